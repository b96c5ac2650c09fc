//! QEMU: a guest with a PCI bus, as users run it.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::accel::{Accel, accel_probe};
use crate::child::Tethered;
use crate::error::{LabError, Result};
use crate::guest::{CONSOLE, Guest, LAB_QMP, QEMU_LOG, QMP, Transfer, boot_twice};
use crate::image::Image;
use crate::initramfs::{self, Wires};
use crate::kernel;
use crate::lab::Lab;
use crate::netns;

/// Boots guests under a stock QEMU.
#[derive(Debug)]
pub struct Qemu;

/// The board QEMU emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// `pc` (i440FX): devices are hot-plugged into the root bus.
    Pc,
    /// `q35`: every hot-plugged device needs a free root port; they are named `port0`, `port1` ….
    Q35 {
        /// How many free root ports the machine has.
        root_ports: u32,
    },
}

/// What a QEMU guest is made of.
#[derive(Debug)]
pub struct QemuConfig {
    /// The board.
    pub machine: Machine,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// An Intel IOMMU with interrupt remapping, which VFIO in the guest needs; `Q35` only. Loads
    /// the VFIO modules.
    pub iommu: bool,
    /// Host taps; the guest finds each as a virtio-net interface, the first as `eth0`.
    pub taps: Vec<String>,
    /// The network namespace QEMU runs in, where `taps` are found.
    pub netns: Option<String>,
    /// Files, programs and modules.
    pub image: Image,
    /// More kernel arguments.
    pub kernel_args: Vec<String>,
    /// More arguments for QEMU.
    pub qemu_args: Vec<String>,
    /// Descriptors QEMU inherits under their numbers, for use in `qemu_args`.
    pub inherit: Vec<OwnedFd>,
    /// Accelerator; `None` probes.
    pub accel: Option<Accel>,
    /// What QEMU finds in its environment besides the test's own.
    pub env: Vec<(String, String)>,
    /// A machine that boots again goes on; else its QEMU ends.
    pub reboots: bool,
    /// Time allowed from start to the first command.
    pub boot_limit: Duration,
}

impl Default for QemuConfig {
    fn default() -> Self {
        Self {
            machine: Machine::Pc,
            memory_mib: 256,
            cpus: 1,
            iommu: false,
            taps: Vec::new(),
            netns: None,
            image: Image::default(),
            kernel_args: Vec::new(),
            qemu_args: Vec::new(),
            inherit: Vec::new(),
            env: Vec::new(),
            accel: None,
            reboots: false,
            boot_limit: Duration::from_secs(300),
        }
    }
}

impl QemuConfig {
    /// Arguments for a card whose back-end speaks vhost-user, with this number of `pairs` of queues, and for memory
    /// that the back-end can map; `socket` is what a chardev of sockets is told behind `path=`.
    pub fn vhost_user(socket: &str, pairs: u32, mac: &str) -> Vec<String> {
        let is_mq = if pairs > 1 { "on" } else { "off" };
        vec![
            "-object".to_owned(),
            "memory-backend-memfd,id=ram,size=256M,share=on".to_owned(),
            "-numa".to_owned(),
            "node,memdev=ram".to_owned(),
            "-chardev".to_owned(),
            format!("socket,id=lan,path={socket}"),
            "-netdev".to_owned(),
            format!("vhost-user,id=lan,chardev=lan,queues={pairs}"),
            "-device".to_owned(),
            // TCG has no way to inject what an eventfd says into MSI-X.
            format!("virtio-net-pci,netdev=lan,vectors=0,mq={is_mq},mac={mac}"),
        ]
    }
}

impl Qemu {
    /// Boots a guest and waits until it serves commands.
    ///
    /// # Errors
    /// [`LabError::Missing`] without QEMU or the guest kernel, [`LabError::Boot`] with the
    /// console's end. A guest that ends before it serves commands is booted once more first.
    pub fn boot(lab: &Lab, mut config: QemuConfig) -> Result<Guest> {
        // Open here until a boot has succeeded: QEMU's arguments name them by number.
        let inherit: Vec<_> = config.inherit.drain(..).map(Arc::new).collect();
        boot_twice(|| Self::attempt(lab, &config, &inherit, None))
    }

    /// Starts a QEMU that waits for the machine of `source`, which was booted with an equal `config`; and says
    /// where QEMU is to send it. The guest can be used when the machine has come.
    ///
    /// # Errors
    /// As [`boot`](Self::boot).
    pub fn incoming(lab: &Lab, config: &QemuConfig, source: &Guest) -> Result<(Guest, String)> {
        let guest = Self::attempt(lab, config, &[], Some(source))?;
        let uri = incoming_uri(guest.dir());
        Ok((guest, uri))
    }

    fn attempt(
        lab: &Lab,
        config: &QemuConfig,
        inherit: &[Arc<OwnedFd>],
        source: Option<&Guest>,
    ) -> Result<Guest> {
        let accel = config.accel.unwrap_or_else(accel_probe);
        let dir = lab.guest_dir()?;
        let initrd = dir.join("initramfs");
        let mut modules = vec!["virtio_pci", "virtio_console", "af_packet"];
        if !config.taps.is_empty() {
            modules.push("virtio_net");
        }
        if config.iommu {
            modules.extend(["vfio_iommu_type1", "vfio_pci"]);
        }
        match source {
            Some(source) => fs::hard_link(source.dir().join("initramfs"), &initrd)
                .map_err(LabError::io("share the initramfs"))?,
            None => initramfs::build(
                &initrd,
                &config.image,
                Wires::Qemu,
                &kernel::qemu_modules()?,
                &modules,
                Path::new(""),
            )?,
        }

        let (commands, their_commands) = UnixStream::pair().map_err(LabError::io("socket pair"))?;
        let (data, their_data) = UnixStream::pair().map_err(LabError::io("socket pair"))?;
        let mut command = Command::new("qemu-system-x86_64");
        command.envs(config.env.iter().cloned());
        command.args(machine_args(config, accel));
        command
            .args(["-display", "none", "-nodefaults"])
            .args((!config.reboots).then_some("-no-reboot"))
            .args([
                "-m",
                &config.memory_mib.to_string(),
                "-smp",
                &config.cpus.to_string(),
            ])
            .args(["-serial", &format!("file:{}", dir.join(CONSOLE).display())])
            .args([
                "-qmp",
                &format!("unix:{},server=on,wait=off", dir.join(QMP).display()),
            ])
            .args([
                "-qmp",
                &format!("unix:{},server=on,wait=off", dir.join(LAB_QMP).display()),
            ])
            .args(["-device", "virtio-serial-pci,id=lab"])
            .args(port_args("lab.cmd", their_commands.as_raw_fd()))
            .args(port_args("lab.data", their_data.as_raw_fd()));
        for (number, tap) in config.taps.iter().enumerate() {
            command
                .args([
                    "-netdev",
                    &format!("tap,id=net{number},ifname={tap},script=no,downscript=no,vhost=off"),
                ])
                .args([
                    "-device",
                    &format!("virtio-net-pci,netdev=net{number},mac=52:54:00:00:00:{number:02x}"),
                ]);
        }
        // no_timer_check: on a busy host an emulated timer is late and the kernel would panic with
        // "timer doesn't work through Interrupt-remapped IO-APIC".
        let mut kernel_args = "console=ttyS0 quiet panic=-1 no_timer_check".to_owned();
        if config.iommu {
            kernel_args.push_str(" intel_iommu=on");
        }
        for arg in &config.kernel_args {
            kernel_args.push(' ');
            kernel_args.push_str(arg);
        }
        command
            .arg("-kernel")
            .arg(kernel::qemu_kernel()?)
            .arg("-initrd")
            .arg(&initrd);
        command
            .args(["-append", &kernel_args])
            .args(&config.qemu_args);
        if source.is_some() {
            command.args(["-incoming", &incoming_uri(&dir)]);
        }

        let errors = File::create(dir.join(QEMU_LOG)).map_err(LabError::io("make QEMU's log"))?;
        let output = errors
            .try_clone()
            .map_err(LabError::io("clone QEMU's log"))?;
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let mut inherit = inherit.to_vec();
        inherit.extend([their_commands, their_data].map(|end| Arc::new(end.into())));
        let netns = config.netns.as_deref().map(netns::open).transpose()?;
        let process = Tethered::spawn(command, inherit, netns).map_err(|error| match error {
            LabError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                LabError::Missing(
                    "no qemu-system-x86_64 on the host: apt-get install qemu-system-x86".to_owned(),
                )
            }
            other => other,
        })?;
        let transfer = Transfer::Port(Mutex::new(Some(data)));
        let log = dir.join(QEMU_LOG);
        if let Some(source) = source {
            return Guest::arriving(lab, dir, process, commands, transfer, source);
        }
        Guest::greet(lab, dir, process, commands, transfer, config.boot_limit).map_err(|error| {
            match error {
                LabError::Boot {
                    what,
                    console,
                    ended,
                } => {
                    let said = std::fs::read_to_string(&log).unwrap_or_default();
                    LabError::Boot {
                        what: format!("{what}; QEMU says: {:?}", said.trim()),
                        // What ends before its console is used has refused its arguments, and
                        // would again.
                        ended: ended && !console.is_empty(),
                        console,
                    }
                }
                other => other,
            }
        })
    }
}

/// Where a QEMU with this directory waits for a machine.
fn incoming_uri(dir: &Path) -> String {
    format!("unix:{}", dir.join("incoming").display())
}

fn machine_args(config: &QemuConfig, accel: Accel) -> Vec<String> {
    let mut args = Vec::new();
    let mut machine = match config.machine {
        Machine::Pc => format!("pc,accel={}", accel.name()),
        Machine::Q35 { .. } => format!("q35,accel={}", accel.name()),
    };
    if config.iommu && accel == Accel::Kvm {
        // QEMU: interrupt remapping needs the IOAPIC in user space.
        machine.push_str(",kernel-irqchip=split");
    }
    args.extend(["-machine".to_owned(), machine, "-cpu".to_owned()]);
    args.push(if accel == Accel::Kvm {
        "host".to_owned()
    } else {
        "max".to_owned()
    });
    if config.iommu {
        // Before all devices it has to translate for.
        args.extend(["-device".to_owned(), "intel-iommu,intremap=on".to_owned()]);
    }
    if let Machine::Q35 { root_ports } = config.machine {
        for number in 0..root_ports {
            args.push("-device".to_owned());
            args.push(format!(
                "pcie-root-port,id=port{number},chassis={},slot={number}",
                number + 1
            ));
        }
    }
    args
}

fn port_args(name: &str, fd: i32) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("socket,id=chr-{name},fd={fd}"),
        "-device".to_owned(),
        format!("virtserialport,bus=lab.0,chardev=chr-{name},name={name}"),
    ]
}
