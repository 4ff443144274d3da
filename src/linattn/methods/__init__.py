"""Methods in their written form: a feature map, with a window or without, or merged keys; their size and error."""

from linattn.methods.map_specs import MapSpec as MapSpec
from linattn.methods.map_specs import parse_map as parse_map
from linattn.methods.method import Method as Method
from linattn.methods.method import parse_method as parse_method
from linattn.methods.method import together as together
