"""``python -m docs.drawings``."""

from docs.drawings import write

if __name__ == "__main__":
    write()
