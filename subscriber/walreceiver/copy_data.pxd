# What the Python form of this module cannot say: libpq's functions are called by their addresses.
from cpython.bytes cimport PyBytes_FromStringAndSize

ctypedef int (*GetCopyData)(void *connection, char **message, int asynchronous) noexcept
ctypedef void (*FreeMemory)(void *message) noexcept


cdef inline (Py_ssize_t, int) take(size_t get_copy_data, size_t free_memory, size_t connection, list messages, Py_ssize_t size) except *:
    cdef char *message = NULL
    cdef Py_ssize_t left = size
    cdef int count = 1
    while left > 0:
        count = (<GetCopyData> get_copy_data)(<void *> connection, &message, 1)
        if count <= 0:
            break
        try:
            messages.append(PyBytes_FromStringAndSize(message, count))
        finally:
            (<FreeMemory> free_memory)(message)
        left -= count
    return left, count
