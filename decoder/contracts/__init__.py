"""What crosses the walls: features, events, policies, topics, settings, errors.

The learner, the pipelines and other people's consumers may depend on this room and on no other
room of the decoder. It imports the standard library, numpy, orjson, pydantic and safetensors only.
"""
