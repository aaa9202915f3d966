"""What must hold on a GPU as it does on a CPU: the same numbers in fp32, near ones in bf16, bounded memory."""

import copy
import inspect

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM

from evals.nll import token_nll
from recipes.loss import loss_without_logits
from recipes.recompute import recomputed_activations
from recipes.tuning import ActivationCheckpointing
from rope_ext import extend, load, load_model, save_extended
from rope_ext.alibi_paths import PATHS, Rows, flash_function
from rope_ext.gqa import group_key_heads
from rope_ext.methods.alibi import geometric_slopes
from rope_ext.registry import parse_method
from tests.conftest import LENGTH_DEPENDENT, STATIC, WINDOW, logits_of, random_llama

FACTOR = 4
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
# Reduction orders differ between devices; logits are up to 30 here
ALIKE = {"atol": 2e-3, "rtol": 0}


def ids_on(device, rows=1, tokens=2 * WINDOW):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 96, (rows, tokens), generator=generator).to(device)


def test_the_gpu_is_used():
    """Where there is one, the tests beside this ran on it: a wrong build of torch would skip them all in silence."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: nothing here was run on a GPU")
    assert torch.version.cuda is not None


@pytest.mark.parametrize("name", [*STATIC, *LENGTH_DEPENDENT])
def test_every_method_gives_the_cpu_s_logits(device, name):
    model = random_llama()
    ids = ids_on("cpu")
    with extend(model, parse_method(name), factor=FACTOR):
        expected = logits_of(model, ids)
    moved = random_llama().to(device)
    with extend(moved, parse_method(name), factor=FACTOR) as patch:
        found = logits_of(moved, ids.to(device)).cpu()
        assert patch.plan.inv_freq.dtype == torch.float32
    torch.testing.assert_close(found, expected, **ALIKE)


@pytest.mark.parametrize("name", ["yarn", "alibi", LENGTH_DEPENDENT[0]])
def test_a_model_that_was_patched_and_then_moved_is_as_one_that_was_moved_first(device, name):
    ids = ids_on(device)
    first, then = random_llama().to(device), random_llama()
    with extend(first, parse_method(name), factor=FACTOR), extend(then, parse_method(name), factor=FACTOR):
        then.to(device)
        assert torch.equal(logits_of(first, ids), logits_of(then, ids))


@pytest.mark.parametrize("name", ["unscaled", "yarn", "llama3", "alibi"])
def test_far_positions_in_bf16_are_as_exact_as_near_ones(device, name):
    """Angles are fp32 in a bf16 model: beyond 256 bf16 skips positions, and would be off by many tokens."""
    whole = random_llama(initializer_range=0.125).to(device)
    half = copy.deepcopy(whole).to(torch.bfloat16)
    ids = ids_on(device, tokens=WINDOW)
    near = torch.arange(WINDOW, device=device)[None]

    def apart(positions):
        both = [model(input_ids=ids, position_ids=positions).logits.float() for model in (whole, half)]
        return float((both[1] - both[0]).std() / both[0].std())

    with (
        torch.no_grad(),
        extend(whole, parse_method(name), factor=2048),
        extend(half, parse_method(name), factor=2048),
    ):
        assert apart(near + 100_000) < 1.5 * apart(near)


@pytest.mark.parametrize("name", ["yarn", "alibi"])
def test_decoding_behind_a_cache_is_as_a_whole_forward(device, name):
    model, ids = random_llama().to(device), ids_on(device, rows=2)
    with extend(model, parse_method(name), factor=FACTOR), torch.no_grad():
        expected = model(input_ids=ids).logits
        cache = DynamicCache(config=model.config)
        first = model(input_ids=ids[:, :-1], use_cache=True, **{CACHE: cache}).logits
        last = model(input_ids=ids[:, -1:], use_cache=True, **{CACHE: cache}).logits
    torch.testing.assert_close(torch.cat((first, last), dim=1), expected, **ALIKE)


@pytest.mark.parametrize("name", ["yarn", "alibi"])
def test_padding_on_the_left_changes_nothing(device, name):
    model, ids = random_llama().to(device), ids_on(device, tokens=40)
    padded = F.pad(ids, (7, 0))
    mask = F.pad(torch.ones_like(ids), (7, 0))
    with extend(model, parse_method(name), factor=FACTOR):
        words = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        alone = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **words)[0, 40:]
        beside = model.generate(input_ids=padded, attention_mask=mask, **words)[0, 47:]
    assert torch.equal(alone, beside)


def test_the_nll_in_pieces_is_the_nll_in_one(device):
    model, ids = random_llama().to(device), ids_on("cpu", tokens=4 * WINDOW)[0].tolist()
    with extend(model, parse_method("yarn"), factor=FACTOR) as patch:
        whole = token_nll(model, ids, frequency_key=patch.frequency_key)
        pieces = token_nll(model, ids, frequency_key=patch.frequency_key, memory_budget=200_000)
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=0)


def test_the_loss_without_logits_has_the_dense_gradients(device):
    model, ids = random_llama().to(device).train(), ids_on(device)

    def step():
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    with extend(model, parse_method("yarn"), factor=FACTOR):
        dense = step()
        for keep in ("nothing", "products"):
            asked = ActivationCheckpointing(keep=keep)
            with loss_without_logits(model, rows=17), recomputed_activations(model, asked):
                ours = step()
            torch.testing.assert_close(ours[0], dense[0], atol=1e-5, rtol=0)
            for mine, theirs in zip(ours[1], dense[1], strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)


def attention(device, dtype, tokens=700):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, 64, generator=generator).to(device, dtype) for heads in (8, 2, 2))
    slopes = torch.tensor(geometric_slopes(8), device=device)
    return Rows(q, k, v, None, torch.arange(tokens, device=device)[None], slopes, 0.125, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["folded", "flash", "flex"])
def test_every_path_of_alibi_is_the_whole_bias(device, dtype, path):
    if path == "flash" and (flash_function() is None or device.type == "cpu" or dtype == torch.float32):
        pytest.skip("needs the package flash-attn 2, a GPU and half precision")
    if path == "flex" and device.type == "cpu":
        pytest.skip("compiling FlexAttention on a CPU is tested in tests/hf/test_alibi.py")
    rows = attention(device, dtype)
    exact = rows._replace(query=rows.query.float(), key=rows.key.float(), value=rows.value.float())
    found, expected = PATHS[path](rows).float(), PATHS["dense"](exact)
    # bf16 keeps 8 bits: .004 a rounding, several of them one behind another
    limit = 1e-5 if dtype == torch.float32 else 0.02
    assert float((found - expected).std() / expected.std()) < limit


@pytest.mark.parametrize("name", ["yarn", "alibi"])
def test_an_export_from_there_loads_anywhere_with_the_same_logits(device, name, tmp_path):
    model, ids = random_llama().to(device), ids_on("cpu")
    extend(model, parse_method(name), factor=FACTOR)
    expected = logits_of(model, ids.to(device)).cpu()
    tokenizer = load_model("tiny", device="cpu")[1]
    save_extended(model, tmp_path / "out", tokenizer=tokenizer, format="rope-ext" if name == "alibi" else "stock")
    found, _ = load(tmp_path / "out", device="cpu")
    torch.testing.assert_close(logits_of(found, ids), expected, **ALIKE)


def test_grouped_heads_are_grouped_where_the_model_is(device):
    model = random_llama().to(device)
    made = group_key_heads(model, 1).model
    assert made.device.type == device.type
    expected = group_key_heads(random_llama(), 1).model
    ids = ids_on("cpu")
    torch.testing.assert_close(logits_of(made, ids.to(device)).cpu(), logits_of(expected, ids), **ALIKE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was run on a GPU")
def test_a_budget_bounds_the_memory_of_the_gpu():
    """Within 16 MiB for activations and logits, where the dense logits alone take 128."""
    model = random_llama(vocab_size=8192, max_position_embeddings=4096).to("cuda")
    ids = torch.randint(0, 8192, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    token_nll(model, ids[:64])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    token_nll(model, ids, memory_budget=16 * 2**20)
    cache = 2 * 2 * 2 * 16 * 4096 * 4
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20 + 2 * cache
