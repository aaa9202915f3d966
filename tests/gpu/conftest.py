"""Where these tests run: on a GPU if there is one, and on the CPU in any case, so that they cannot rot unseen."""

import pytest
import torch

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was run on a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def device(request):
    return torch.device(request.param)
