"""``python -m convt_reduce bench``: the operator against its peers, and against the memory.

Reading order: `_case` says what one measurement is, `_cases` lists them, `_peers` says who
competes, `_oracle` who is right, `_timing` how time is taken, `_subject` what is called. `_run`
does it all and writes the record, `_targets` and `_table` judge and show it. Imported by nothing
but the command line and the repository's benchmarks/, which adds peers that need a compiler.
"""
