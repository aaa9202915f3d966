"""`python -m rope_ext`, and what `torchrun -m rope_ext` starts in every process."""

from rope_ext.cli import main

if __name__ == "__main__":
    main()
