"""One decode step of each kind of layer, operator by operator: the calls, their operands, and what they cost."""
