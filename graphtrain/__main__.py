"""Entry point of `python -m graphtrain`."""

from graphtrain.cli import main

if __name__ == "__main__":
    main()
