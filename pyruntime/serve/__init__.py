"""A scoring service over HTTP: `pyruntime serve`. It needs fastapi and uvicorn (extra "serve")."""
