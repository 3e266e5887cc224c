"""The daemon dies by `kill -9` at random instants; what it acknowledged must be there when it is back.

python -m tests.crash --seconds 120 --seed 1 --json -
"""
