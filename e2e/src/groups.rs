//! What tests of groups in guests have in common: who is in a group, what its members got, and what a
//! guest can write.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use vnplug::{Next, Port};
use vnplug_ring::control::Counted;
use vnplug_testing::PATIENCE;

use crate::attached::image;
use crate::daemon::{Daemon, label};
use crate::{Guest, Lab, Machine, Qemu, QemuConfig, Result};

/// How an arena's first word looks to [`store`], and a pool's: `VNPLAREN` and `VNPLPOOL`.
pub const ARENA: &str = "0x4E4552414C504E56";
/// See [`ARENA`].
pub const POOL: &str = "0x4C4F4F504C504E56";

/// Boots a QEMU guest of this machine with `vnplug` in it.
///
/// # Errors
/// What its console said.
pub fn boot(lab: &Lab, machine: Machine) -> Result<Guest> {
    let config = QemuConfig {
        machine,
        image: image()?,
        ..QemuConfig::default()
    };
    Qemu::boot(lab, config)
}

/// The ports in a group, after an audit.
///
/// # Panics
/// If the sums do not close.
#[must_use]
pub fn members(daemon: &Daemon, group: &str) -> Vec<Counted> {
    let ports = daemon.audit().into_iter();
    ports
        .filter(|it| it.kind == "port" && label(it, "group") == group)
        .collect()
}

/// Takes what a port has now.
///
/// # Panics
/// If the port is over.
pub fn take(port: &mut Port, frames: &mut Vec<Vec<u8>>) {
    loop {
        match port.next().expect("the port lives") {
            Next::Packet(packet) => frames.push(packet.bytes.to_vec()),
            Next::Nothing => return,
            Next::Ended => panic!("the source does not end"),
        }
    }
}

/// The frames of a pcap file that a guest wrote.
///
/// # Errors
/// [`LabError`](crate::LabError) if it does not come.
///
/// # Panics
/// If it is no pcap file.
pub fn pull(guest: &Guest, lab: &Lab, path: &str) -> Result<Vec<Vec<u8>>> {
    let here = lab.dir().join("pulled");
    guest.pull(path, &here, PATIENCE)?;
    let bytes = std::fs::read(&here).expect("it was pulled");
    let mut frames = Vec::new();
    let mut rest = &bytes[24..];
    while !rest.is_empty() {
        let len = rest[8..12].try_into().expect("four bytes");
        let len = u32::from_le_bytes(len) as usize;
        frames.push(rest[16..16 + len].to_vec());
        rest = &rest[16 + len..];
    }
    Ok(frames)
}

/// A word of a file.
///
/// # Panics
/// If it cannot be read.
#[must_use]
pub fn word(path: &Path, offset: u64) -> u64 {
    let mut word = [0; 8];
    let file = File::open(path).expect("it is there");
    file.read_exact_at(&mut word, offset).expect("so long");
    u64::from_le_bytes(word)
}

/// Stores a word at `offset` of the guest's device whose memory begins with `magic`, as the guest's
/// root can, and tells what it reads there afterwards.
///
/// # Errors
/// [`LabError`](crate::LabError) if the guest does not answer.
pub fn store(guest: &Guest, magic: &str, offset: u64, word: u64) -> Result<String> {
    let script = format!(
        "for d in /sys/bus/pci/devices/*; do
            [ \"$(cat $d/device 2>/dev/null)\" = 0x1110 ] || continue
            a=$(sed -n 3p $d/resource | cut -d' ' -f1)
            [ $(devmem $a 64) = {magic} ] || continue
            devmem $((a + {offset})) 64 {word:#x} && devmem $((a + {offset})) 64
         done 2>&1"
    );
    Ok(guest.run(&script, PATIENCE)?.text())
}
