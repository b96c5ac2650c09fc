//! Readers in guests, over vNPlug and over the guest's own NIC.

use std::process::Command;

use vnplug_e2e::daemon::{Daemon, guest_program};
use vnplug_e2e::{Guest, Qemu, QemuConfig, UmlConfig, accel_probe};

use super::{Side, Way, by_size, host, lossless};
use crate::pcap::image;
use crate::row::{Figure, Plan, Result};
use crate::sys;
use crate::uml::{AttachedUml, LIMIT, serve};
use crate::wire::Wire;

/// One reader in User-mode Linux; the same on the host beside it.
pub(crate) fn one_uml(plan: &Plan) -> Result<Vec<Figure>> {
    in_umls(plan, "capture-uml", 1, 1)
}

/// Two readers in one User-mode Linux.
pub(crate) fn two_in_uml(plan: &Plan) -> Result<Vec<Figure>> {
    in_umls(plan, "capture-uml-two", 1, 2)
}

/// A reader in each of two User-mode Linux.
pub(crate) fn two_umls(plan: &Plan) -> Result<Vec<Figure>> {
    in_umls(plan, "capture-umls", 2, 1)
}

fn in_umls(plan: &Plan, row: &str, guests: usize, readers: usize) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let (wire, daemon) = wire_and_daemon()?;
        let mut umls = Vec::new();
        for number in 0..guests {
            let config = UmlConfig {
                nics: vec!["wire1".into()],
                netns: Some(wire.netns.name().to_owned()),
                image: image(&wire.lab)?,
                kernel_args: vec!["ipv6.disable=1".into()],
                ..UmlConfig::default()
            };
            let uml = AttachedUml::boot_as(&wire.lab, &daemon, &format!("bench{number}"), config)?;
            listen_on(uml.guest(), "vec0")?;
            umls.push(uml);
        }
        let (mut ours, mut nic) = (Way::new("far0", Some(&daemon)), Way::new("far1", None));
        for guest in umls.iter().map(AttachedUml::guest) {
            for _ in 0..readers {
                ours = ours.in_guest(guest, OVER_VNPLUG, "host:wire0")?;
                nic = nic.in_guest(guest, "", "vec0")?;
            }
        }
        // On a wire of its own: a reader that sleeps costs the others' daemon a copy.
        let mut beside = host::vnplug(&wire.lab, Some(&wire.netns), &daemon, "far2", "wire2")?;
        let mut sides = vec![
            Side {
                name: "vNPlug",
                way: &mut ours,
            },
            Side {
                name: "the guest's own NIC",
                way: &mut nic,
            },
        ];
        let alone = (guests, readers) == (1, 1);
        if alone {
            sides.push(Side {
                name: "the same on the host",
                way: &mut beside,
            });
        }
        let how = format!(
            "{guests} guest(s) of User-mode Linux with {readers} reader(s) each, whose rates are \
             added; pcap_dispatch over the drop-in, and over libpcap on the guest's own NIC (vector \
             driver, raw transport); 16 MiB of buffer for each reader; idle is of the CPUs beside \
             the sender's, and counts the guests' kernels too"
        );
        let mut figures = by_size(plan, &wire, row, &mut sides, &how)?;
        if alone {
            figures.push(lossless(plan, &wire, row, &mut sides)?);
        }
        Ok(figures)
    })
}

/// One reader in a stock QEMU.
pub(crate) fn qemu(plan: &Plan) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let (wire, daemon) = wire_and_daemon()?;
        let netns = &wire.netns;
        netns.tap("tap0")?;
        netns.ip(&["link", "set", "tap0", "txqueuelen", "10000"])?;
        netns.bridge("br0", &["wire1", "tap0"])?;
        // A bridge that forgets addresses at once sends every frame to every port.
        netns.ip(&["link", "set", "br0", "type", "bridge", "ageing_time", "0"])?;
        let accel = accel_probe();
        let guest = Qemu::boot(
            &wire.lab,
            QemuConfig {
                taps: vec!["tap0".into()],
                netns: Some(netns.name().to_owned()),
                image: image(&wire.lab)?.file(guest_program()?, "/usr/bin/vnplug", 0o755),
                kernel_args: vec!["ipv6.disable=1".into()],
                qemu_args: ["-global", "virtio-net-pci.rx_queue_size=1024"]
                    .map(str::to_owned)
                    .to_vec(),
                accel: Some(accel),
                ..QemuConfig::default()
            },
        )?;
        listen_on(&guest, "eth0")?;
        attach(&guest, &daemon)?;
        let _agent = serve(&guest)?;
        let mut ours =
            Way::new("far0", Some(&daemon)).in_guest(&guest, OVER_VNPLUG, "host:wire0")?;
        let mut nic = Way::new("far1", None).in_guest(&guest, "", "eth0")?;
        let mut sides = [
            Side {
                name: "vNPlug",
                way: &mut ours,
            },
            Side {
                name: "virtio-net",
                way: &mut nic,
            },
        ];
        let how = format!(
            "one guest of QEMU ({}), one processor; pcap_dispatch over the drop-in, and over libpcap \
             on virtio-net (tap, 1024 descriptors); 16 MiB of buffer for each; idle is of the CPUs \
             beside the sender's",
            accel.name()
        );
        let mut figures = by_size(plan, &wire, "capture-qemu", &mut sides, &how)?;
        figures.push(lossless(plan, &wire, "capture-qemu", &mut sides)?);
        Ok(figures)
    })
}

/// Three wires, and a daemon that listens on the first and the last.
fn wire_and_daemon() -> Result<(Wire, Daemon)> {
    let wire = Wire::new()?;
    wire.add(1)?;
    wire.add(2)?;
    let sources = ["--source", "wire0", "--source", "wire2"];
    let daemon = Daemon::start(&wire.lab, Some(&wire.netns), &sources)?;
    Ok((wire, daemon))
}

/// Sets a guest's NIC up, to take every frame.
fn listen_on(guest: &Guest, nic: &str) -> Result<()> {
    let up = guest.run(&format!("ip link set {nic} promisc on up"), LIMIT)?;
    match up.success() {
        true => Ok(()),
        false => Err(up.text().into()),
    }
}

/// Plugs vNPlug into a running QEMU, by the user's own command.
fn attach(guest: &Guest, daemon: &Daemon) -> Result<()> {
    let output = Command::new(guest_program()?)
        .arg("--socket")
        .arg(daemon.socket())
        .args(["attach", "qemu", "--name", "bench", "--pool", "64M"])
        .args(["--wait", "0s", "--allow", "wire0", "--qmp"])
        .arg(guest.qmp_path().ok_or("QEMU has no QMP socket")?)
        .output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned().into()),
    }
}

/// What makes the counter use the drop-in.
pub(crate) const OVER_VNPLUG: &str = "LD_LIBRARY_PATH=/lib/vnplug";
