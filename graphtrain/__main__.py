"""`python -m graphtrain`: the command."""

from graphtrain.cli import main

if __name__ == "__main__":
    main()
