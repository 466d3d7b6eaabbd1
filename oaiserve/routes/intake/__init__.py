"""Intake: from the bytes of a request to an `Intake`, from which its route makes the answer.

read.py has the one function for all this, `read`. It calls, in this order:
- receive.py: the bytes of the body, within limits, without their content codings;
- decode.py: the JSON of the body as a struct of body_types.py, whose values are those of object_types.py;
- parameters.py: numbers, strings and lists in their ranges, and the sampling parameters that they make;
- media.py: images and sounds, and those that the body only names.
turns.py does the work on large bodies in turns with that of other clients. invalid.py has the errors about bodies,
sampling_defaults.py the operator's and the model's values for what a body leaves out, and outlines.py the hashes by
which later prompts are compared with this one.
"""
