"""Right implementations that round otherwise than the reference: what the suite must never fail.

Every operator in float32, with other orders of summation, contracted products and other formulas for the same
functions, and attention with bfloat16 probabilities, declared. A private copy of the reference with some of its
functions replaced; what is discrete stays as it is.
"""
