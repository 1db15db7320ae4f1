"""What the command line needs to know about data.  Imports no reader."""

KINDS = "text, .jsonl, .csv, .tsv, .parquet, .json, a folder of kos tokenize, or token files"
"""The kinds of data that kos reads, for help and errors."""

HOLD_OUT = 0.1
"""The fraction that is held out for validation: of a file, or of the files of a folder."""
