//! The native part of the Python package `vnplug`: a port, its packets, and batches of them as
//! memory that NumPy reads where it lies.
//!
//! ```text
//!   Port ── Shared ── libvnplug's port, one loan at a time
//!     ├── Packet    owns its bytes
//!     └── Batch     rows about packets (owned), and their bytes: in the ring (a loan) or copied
//!           └── View    what memoryview and NumPy see; keeps rows, bytes and loan alive
//!   BackEnd, Channel ── End ── libvnplug's, one thread at a time
//!     └── Memory    copies out and in
//! ```
//!
//! The interpreter's lock is released while a port waits, opens or asks. What Python sees of it is
//! described in `vnplug/_native.pyi`; misuse raises, it never reads memory that is not ours
//! (`shared.rs` says why).

mod error;

mod shared;
mod view;

mod batch;
mod packet;
mod port;

mod bundle;

mod backend;
mod channel;

mod devices;
mod open;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::backend::{BackEnd, Memory, News};
    #[pymodule_export]
    use crate::batch::Batch;
    #[pymodule_export]
    use crate::bundle::Bundle;
    #[pymodule_export]
    use crate::channel::{BackEndInfo, Channel, back_ends};
    #[pymodule_export]
    use crate::devices::{Device, devices};
    #[pymodule_export]
    use crate::open::open;
    #[pymodule_export]
    use crate::packet::Packet;
    #[pymodule_export]
    use crate::port::{Batches, Port, Stats};
}
