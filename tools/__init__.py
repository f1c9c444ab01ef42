"""Commands that look into cubins and measurements; installed as `pyruntime.tools`."""
