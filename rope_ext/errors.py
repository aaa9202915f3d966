"""What users can catch. Each child also subclasses the builtin that fits, so `except ValueError` keeps working.

RopeExtError
+-- GeometryError (ValueError)   a head_dim, theta or window that no rotary embedding can have
+-- MethodError (ValueError)     an unknown method, or a hyper-parameter out of its range
+-- ContextError (ValueError)    a target window that cannot be reached
+-- ModelError (ValueError)      a model that cannot be found, loaded, or patched
+-- PatchError (RuntimeError)    a patch that is not in effect, or undone out of order
+-- ExportError (RuntimeError)   a checkpoint that cannot be written, or would not reload the same
"""


class RopeExtError(Exception):
    """Base of everything that rope-ext raises on purpose; its text is one line that says what to do."""


class GeometryError(RopeExtError, ValueError):
    """A rotary geometry that cannot exist."""


class MethodError(RopeExtError, ValueError):
    """An unknown method or a hyper-parameter out of its range."""


class ContextError(RopeExtError, ValueError):
    """A context or a factor that cannot be reached."""


class ModelError(RopeExtError, ValueError):
    """A model that cannot be found, loaded, or patched."""


class PatchError(RopeExtError, RuntimeError):
    """A patch that is not in effect, or that is undone out of order."""


class ExportError(RopeExtError, RuntimeError):
    """A checkpoint that cannot be written, or that would not reload the same."""
