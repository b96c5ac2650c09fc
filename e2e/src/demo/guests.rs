//! The two guests: how each is booted, and how it gets vNPlug.

use std::process::Command;

use vnplug_ring::control::Grant;

use super::capture::{Subject, Way};
use super::wire::{TAPPED, until};
use super::{Findings, LIMIT, Stage, unchanged};
use crate::accel::accel_probe;
use crate::attached::{attach_uml, uml_spec};
use crate::daemon::{Daemon, guest_program};
use crate::error::{LabError, Result};
use crate::guest::Guest;
use crate::image::Image;
use crate::qemu::{Qemu, QemuConfig};
use crate::uml::{Uml, UmlConfig};

/// User-mode Linux gets its memory when it starts, so it boots once for each way.
pub(super) fn uml(stage: &Stage, findings: &mut Findings) -> Result<()> {
    stage.say("User-mode Linux boots, with a NIC of its own (vector driver, raw transport)");
    let config = || -> Result<UmlConfig> {
        Ok(UmlConfig {
            memory_mib: 256,
            netns: Some(stage.wire.here.name().to_owned()),
            image: image()?,
            kernel_args: vec!["ipv6.disable=1".to_owned()],
            ..UmlConfig::default()
        })
    };
    let nics = vec![TAPPED.to_owned()];
    let guest = Uml::boot(&stage.lab, UmlConfig { nics, ..config()? })?;
    listen_on(&guest, "vec0")?;
    stage.measure(
        &subject(stage, &guest, "uml", Way::Nic("vec0")),
        1,
        findings,
    )?;
    drop(guest);

    stage.say("User-mode Linux boots again, with vNPlug's memory (as `vnplug attach uml` does it)");
    let daemon = daemon(stage)?;
    let allow = vec![Grant {
        source: "wire".into(),
        filter: String::new(),
    }];
    let spec = uml_spec("demo-uml", POOL_BYTES, allow);
    let (config, _channel) = attach_uml(&daemon, spec, config()?)?;
    let guest = Uml::boot(&stage.lab, config)?;
    serve(&guest)?;
    stage.measure(
        &subject(stage, &guest, "uml", Way::Vnplug(&daemon)),
        2,
        findings,
    )?;
    unchanged::tcpdump(stage, &guest)
}

/// A QEMU gets vNPlug while it runs.
pub(super) fn qemu(stage: &Stage, findings: &mut Findings) -> Result<()> {
    stage.say("QEMU: looking for an accelerator that really runs a guest");
    let accel = accel_probe();
    let name = format!("qemu-{}", accel.name());
    stage.say(&format!(
        "{name} boots, with virtio-net on a tap (rx_queue_size=1024)"
    ));
    let here = &stage.wire.here;
    here.tap("tap0")?;
    here.ip(&[
        "link",
        "set",
        "tap0",
        "txqueuelen",
        "10000",
        "master",
        "br0",
    ])?;
    let config = QemuConfig {
        taps: vec!["tap0".to_owned()],
        netns: Some(here.name().to_owned()),
        image: image()?,
        kernel_args: vec!["ipv6.disable=1".to_owned()],
        qemu_args: ["-global", "virtio-net-pci.rx_queue_size=1024"]
            .map(str::to_owned)
            .to_vec(),
        accel: Some(accel),
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&stage.lab, config)?;
    listen_on(&guest, "eth0")?;
    stage.measure(
        &subject(stage, &guest, &name, Way::Nic("eth0")),
        3,
        findings,
    )?;

    // From here on its own NIC gets nothing.
    stage.wire.set("tap0", false)?;
    let daemon = daemon(stage)?;
    attach(stage, &guest, &daemon)?;
    serve(&guest)?;
    stage.measure(
        &subject(stage, &guest, &name, Way::Vnplug(&daemon)),
        4,
        findings,
    )?;
    unchanged::tcpdump(stage, &guest)
}

/// Plugs vNPlug into the running machine, by the user's own command.
fn attach(stage: &Stage, guest: &Guest, daemon: &Daemon) -> Result<()> {
    let qmp = guest.qmp_path();
    let qmp = qmp.ok_or_else(|| LabError::Missing("QEMU has no QMP socket".to_owned()))?;
    let pool = format!("{}M", POOL_BYTES >> 20);
    let mut command = Command::new(guest_program()?);
    command.arg("--socket").arg(daemon.socket());
    command.args(["attach", "qemu", "--name", "demo-qemu", "--pool", &pool]);
    command.args(["--allow", "wire", "--qmp"]).arg(&qmp);
    stage
        .say("hot-plugging vNPlug into the running guest: no reboot, stock QEMU, no kernel module");
    let shown = qmp.display();
    println!(
        "            $ vnplug attach qemu --name demo-qemu --pool {pool} --allow wire --qmp {shown}"
    );
    let output = command
        .output()
        .map_err(LabError::io("run vnplug attach"))?;
    if output.status.success() {
        print!("            {}", String::from_utf8_lossy(&output.stdout));
        return Ok(());
    }
    Err(LabError::Command {
        command: "vnplug attach qemu".to_owned(),
        text: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Starts the agent and waits until applications in the guest see the wire.
fn serve(guest: &Guest) -> Result<()> {
    let agent = guest.spawn("exec vnplug agent")?;
    until("the guest sees the wire", || {
        if agent.is_done() {
            return Err(LabError::Command {
                command: "vnplug agent".to_owned(),
                text: agent.wait(LIMIT)?.text(),
            });
        }
        let list = guest.run("vnplug list", LIMIT)?;
        Ok(list.text().contains("host:wire"))
    })
}

/// The daemon, listening on the wire with a kernel ring of 256 MiB.
fn daemon(stage: &Stage) -> Result<Daemon> {
    let source = format!("wire=af_packet:{TAPPED},blocks=1024");
    Daemon::start(&stage.lab, Some(&stage.wire.here), &["--source", &source])
}

fn subject<'a>(stage: &'a Stage, guest: &'a Guest, name: &'a str, way: Way<'a>) -> Subject<'a> {
    Subject {
        wire: &stage.wire,
        talkers: &stage.talkers,
        guest,
        name,
        way,
    }
}

/// What both ways need in the guest.
fn image() -> Result<Image> {
    let image = unchanged::image(Image::default())?;
    Ok(image.file(guest_program()?, "/usr/bin/vnplug", 0o755))
}

/// Sets a guest's NIC up, to take every frame.
fn listen_on(guest: &Guest, nic: &str) -> Result<()> {
    let command = format!("ip link set {nic} promisc on up");
    let output = guest.run(&command, LIMIT)?;
    if output.success() {
        return Ok(());
    }
    Err(LabError::Command {
        command,
        text: output.text(),
    })
}

const POOL_BYTES: u64 = 256 << 20;
