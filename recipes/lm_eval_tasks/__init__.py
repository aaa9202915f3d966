"""Our tasks for lm-eval: YAML, and what makes their documents."""
