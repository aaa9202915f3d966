"""What kind of number a task's metric is: how documents' values make one, and what a difference is counted in."""

from typing import Literal

Kind = Literal["share", "perplexity", "mean"]
HARNESS = "lm-eval/"
"""What the names of lm-eval's tasks begin with here."""
STRING_MATCH = "string-match"
"""The share of what was to be found; RULER's tasks call it by the length."""
SHARES = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "em", "f1", "found", STRING_MATCH}
METRICS = {
    "perplexity": "perplexity",
    "nll-by-position": "nll",
    "long-context-gain": "nll-difference",
    "passkey": "accuracy",
}
"""The metric of our own tasks' cells."""


def metric_of(task: str, protocol: str) -> str:
    """Return the metric of a column; of lm-eval's it is what the protocol begins with."""
    return METRICS[task] if task in METRICS else protocol.partition(",")[0]


def kind_of(task: str, protocol: str) -> Kind:
    """Return how units' values make one: the share of a total, a perplexity of nats, or a mean without bounds."""
    if task in METRICS:
        return "share" if task == "passkey" else "perplexity" if task == "perplexity" else "mean"
    return kind_of_metric(metric_of(task, protocol))


def kind_of_metric(name: str) -> Kind:
    """Return the kind of one of lm-eval's metrics."""
    if name == "perplexity" or name.endswith("_perplexity"):
        return "perplexity"
    return "share" if name in SHARES else "mean"
