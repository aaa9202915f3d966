"""The run-time checker of annotations under pytest: shapes by jaxtyping, everything else by beartype.

An int passes for a float, as PEP 484 says and as every caller writes.
"""

from beartype import BeartypeConf, beartype

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
