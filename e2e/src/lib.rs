//! The **lab**: boots real guests for tests, the demo and the bench.
//!
//! ```text
//!   Lab ── a directory that goes away, and a sweep of what killed labs left behind
//!    ├── Netns        a network namespace: wires (veth), bridges, taps, no stray packet
//!    ├── Uml::boot    User-mode Linux: a guest at native speed, no KVM needed
//!    ├── container::start  a rootless container: of the host it has the daemon's socket
//!    ├── Qemu::boot   a stock QEMU: `pc` or `q35`, KVM where it works, else TCG
//!    │     └── Guest  run · spawn · pull · push · cpu_time · qmp · kill
//!    ├── DiskFault    a disk of a guest that fails, loses or stalls when told
//!    ├── traffic      sends numbered frames on an interface (also the tool `wiregen`)
//!    └── programs     what nobody here wrote, on the real wire and through vNPlug's libpcap
//! ```
//!
//! A guest is a kernel and an initramfs the lab packs on the spot: busybox, the modules asked for,
//! the programs and files asked for, and an init that serves commands on a channel of its own
//! (never on the console). Nothing is installed on the host and nothing outlives the process: every
//! child dies with it, also when it is killed with SIGKILL.
//!
//! The lab knows nothing of vNPlug but [`daemon`] and who starts it ([`manager`]), [`wire`], [`recorder`], [`groups`], [`raw`],
//! [`played`], [`station`], [`sums`], [`streamer`], [`secure`], [`asking`], [`programs`] and [`demo`]: where the programs under test are, a daemon and a recorder that
//! end with their test, what groups in guests are looked at with, a client that says what it likes, VMs that a test plays,
//! machines on a switch, a capture there whose checksums are looked at, a client of its streams, servers of TLS and QUIC, a sandbox and who answers it, other people's programs, and what shows it all.
//! [`third_party`] builds programs against the header, as strangers do; [`typed`] types what pages say.
//! Everything else under test comes in as files and programs.

mod accel;
pub mod asking;
pub mod attached;
pub mod beside;
pub mod bombs;
mod channel;
mod child;
pub mod container;
pub mod containers;
pub mod daemon;
pub mod demo;
mod disk;
pub mod ends;
mod error;
pub mod groups;
mod guest;
pub mod huge_pages;
mod image;
mod initramfs;
mod kernel;
mod lab;
pub mod libvirt;
pub mod manager;
mod netns;
mod owner;
mod patience;
pub mod played;
pub mod plot;
pub mod programs;
mod qemu;
mod qmp;
pub mod raw;
pub mod reading;
pub mod recorder;
pub mod secure;
pub mod silent_file;
pub mod station;
pub mod stopped;
pub mod streamer;
pub mod sums;
mod sys;
pub mod third_party;
pub mod times;
pub mod traffic;
pub mod typed;
mod uml;
pub mod user;
pub mod wire;
mod write_log;

pub use accel::{Accel, accel_probe};
pub use channel::{Job, Output};
pub use disk::{DiskFault, Fault};
pub use error::{LabError, Result};
pub use guest::Guest;
pub use image::{GuestFile, Image};
pub use lab::Lab;
pub use netns::Netns;
pub use qemu::{Machine, Qemu, QemuConfig};
pub use qmp::Qmp;
pub use uml::{Uml, UmlConfig};
pub use write_log::{LoggedDisk, WriteLog};
