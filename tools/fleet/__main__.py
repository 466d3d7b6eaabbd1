"""Runs the simulation: python -m tools.fleet. Its processes import `scale`, and could not import this module."""

from tools.fleet.scale import main

if __name__ == "__main__":
    main()
