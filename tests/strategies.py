"""Hypothesis strategies, in one place: geometries as checkpoints have them, and factors."""

from hypothesis import strategies as st

from rope_ext.geometry import RopeGeometry


@st.composite
def geometries(draw: st.DrawFn) -> RopeGeometry:
    """Head dimensions 4..256, bases 1e3..1e8, windows 64..2^20."""
    return RopeGeometry(
        head_dim=2 * draw(st.integers(2, 128)),
        theta=draw(st.floats(1e3, 1e8)),
        original_context=draw(st.integers(64, 2**20)),
    )


factors = st.floats(1.0, 64.0)
