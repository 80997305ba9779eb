"""`python -m wholestep`: the same as the command `wholestep`."""

from wholestep.cli import main

if __name__ == "__main__":
    main()
