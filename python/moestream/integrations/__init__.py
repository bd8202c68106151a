"""moestream inside other bindings of llama.cpp, with the libraries those bindings brought.

Importing this package imports no binding and loads no libllama.
"""
