"""Runs replicas on a real cluster of Ray on this machine: what faults cost clients, and what streaming costs.

`python -m tools.cluster faults` and `python -m tools.cluster costs` write the tables of docs/scale.md. The engines are
real ones with a device double, which computes nothing and takes a set time for a step. It needs oaiserve[ray].
"""
