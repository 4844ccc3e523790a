"""The ground floor: shared-memory rings and slabs, in C behind cffi. Imports nothing of ours."""
