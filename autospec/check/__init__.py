"""``autospec check``: is a service a candidate for speculative decoding at all?"""
