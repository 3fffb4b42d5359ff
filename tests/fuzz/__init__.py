"""Differential fuzzing: random calls, right and wrong, against PyTorch in float64.

`python tests/fuzz --help` is the door. `problem` draws a right call, `check` computes it both ways,
`malformed` draws a wrong one and knows what must be said, `kinds` has the arguments that are no
plain tensors or numbers, `shrink` makes a failure small, `cli` counts. A case is a function of the
seed and its number alone.
"""
