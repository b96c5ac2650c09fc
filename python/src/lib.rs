//! The native part of the Python package `vnplug`.

use pyo3::prelude::*;

#[pymodule]
mod _native {}
