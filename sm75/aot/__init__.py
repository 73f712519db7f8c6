"""Triton kernels compiled ahead of time for sm_75, by the last Triton that has tensor cores there.

``adapt`` makes vLLM's sources readable for that Triton, ``worker`` lowers them in its environment,
``record`` says which launches there are, ``plan`` what is compiled for each, ``pack`` makes the
package's files.
"""
