"""Rank 1 of a program that a test leads: `python -m tests.launch.follower PLACE [blind]`. blind: it sees no folder of rank 0."""

import json
import sys

from launch import joined
from launch.place import Place
from launch.serving import Server

if __name__ == "__main__":
    if "blind" in sys.argv:
        joined.Handed.is_seen = False
    server = Server(("-m", "tests.launch.follower", *sys.argv[1:]))
    sys.exit(server.serve(Place(**json.loads(sys.argv[1])), lambda folder, payload, environment: {"MDCS_SAYS": payload}))
