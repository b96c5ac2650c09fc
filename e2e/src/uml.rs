//! User-mode Linux: a guest as a process.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::child::Tethered;
use crate::error::{LabError, Result};
use crate::guest::{CONSOLE, Guest, Transfer, boot_twice};
use crate::image::Image;
use crate::initramfs::{self, Wires};
use crate::kernel;
use crate::lab::Lab;
use crate::netns;

/// Boots guests under User-mode Linux (Debian's `user-mode-linux`).
#[derive(Debug)]
pub struct Uml;

/// What a User-mode Linux guest is made of.
#[derive(Debug)]
pub struct UmlConfig {
    /// Memory in MiB.
    pub memory_mib: u32,
    /// A host file the guest finds as `/dev/mmapper`; its length is the device's.
    pub pool: Option<PathBuf>,
    /// Host ends of the guest's tty lines by line number: `(0, fd)` is `/dev/ttyS0`. The lab keeps
    /// line 1 for itself.
    pub lines: Vec<(u32, OwnedFd)>,
    /// Host interfaces; the guest finds the first as `vec0` (vector driver, raw transport).
    pub nics: Vec<String>,
    /// The network namespace the guest's process runs in, where `nics` are found.
    pub netns: Option<String>,
    /// Files, programs and modules.
    pub image: Image,
    /// More kernel arguments.
    pub kernel_args: Vec<String>,
    /// A command that starts `linux.uml`, and its arguments; its command line is put behind them. The
    /// guest is over when the command is killed, if it sees to that.
    pub starter: Vec<String>,
    /// Descriptors the guest's process inherits under their numbers, for use in `kernel_args`.
    pub inherit: Vec<OwnedFd>,
    /// What the guest's process finds in its environment besides the test's own.
    pub env: Vec<(String, String)>,
    /// Time allowed from start to the first command.
    pub boot_limit: Duration,
}

impl Default for UmlConfig {
    fn default() -> Self {
        Self {
            memory_mib: 128,
            pool: None,
            lines: Vec::new(),
            nics: Vec::new(),
            netns: None,
            image: Image::default(),
            kernel_args: Vec::new(),
            starter: Vec::new(),
            inherit: Vec::new(),
            env: Vec::new(),
            boot_limit: Duration::from_secs(180),
        }
    }
}

impl UmlConfig {
    /// A guest of this image with a card `eth0` whose back-end serves vhost-user at this socket.
    pub fn vhost_user(socket: &Path, image: Image) -> Self {
        Self {
            kernel_args: vec![format!("virtio_uml.device={}:1", socket.display())],
            image: image.module("virtio_net"),
            ..Self::default()
        }
    }
}

impl Uml {
    /// Boots a guest and waits until it serves commands.
    ///
    /// # Errors
    /// [`LabError::Missing`] without `linux.uml`, [`LabError::Boot`] with the console's end. A
    /// guest that ends before it serves commands is booted once more first.
    pub fn boot(lab: &Lab, mut config: UmlConfig) -> Result<Guest> {
        // Open here until a boot has succeeded: the kernel's arguments name them by number.
        let inherit: Vec<_> = config.inherit.drain(..).map(Arc::new).collect();
        let lines: Vec<_> = config
            .lines
            .drain(..)
            .map(|(number, line)| (number, Arc::new(line)))
            .collect();
        boot_twice(|| Self::attempt(lab, &config, &inherit, &lines))
    }

    fn attempt(
        lab: &Lab,
        config: &UmlConfig,
        inherit: &[Arc<OwnedFd>],
        lines: &[(u32, Arc<OwnedFd>)],
    ) -> Result<Guest> {
        let dir = lab.guest_dir()?;
        let shared = dir.join("shared");
        fs::create_dir(&shared).map_err(LabError::io("make the shared directory"))?;
        let initrd = dir.join("initramfs");
        let modules = kernel::uml_modules()?;
        initramfs::build(&initrd, &config.image, Wires::Uml, &modules, &[], &shared)?;

        let (ours, theirs) = UnixStream::pair().map_err(LabError::io("socket pair"))?;
        let mut inherit = inherit.to_vec();
        let mut words = config
            .starter
            .iter()
            .map(String::as_str)
            .chain(["linux.uml"]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        command.envs(config.env.iter().cloned());
        command
            .arg(format!("mem={}M", config.memory_mib))
            .arg(format!("initrd={}", initrd.display()))
            .arg(format!("uml_dir={}", dir.join("uml").display()))
            .args([
                "umid=guest",
                "con=null",
                "ssl=null",
                "con0=null,fd:1",
                "quiet",
                "panic=-1",
            ])
            .arg(format!("ssl1=fd:{}", theirs.as_raw_fd()));
        inherit.push(Arc::new(theirs.into()));
        for (number, line) in lines {
            command.arg(format!("ssl{number}=fd:{}", line.as_raw_fd()));
            inherit.push(Arc::clone(line));
        }
        for (number, nic) in config.nics.iter().enumerate() {
            command.arg(format!(
                "vec{number}:transport=raw,ifname={nic},depth=128,gro=1"
            ));
        }
        if let Some(pool) = &config.pool {
            command.arg(format!("iomem=mmapper,{}", pool.display()));
        }
        command.args(&config.kernel_args);

        let console =
            File::create(dir.join(CONSOLE)).map_err(LabError::io("make the console log"))?;
        let errors = console
            .try_clone()
            .map_err(LabError::io("clone the console log"))?;
        command
            .env("TMPDIR", memory_dir(config.memory_mib, &dir))
            .stdin(Stdio::null())
            .stdout(console)
            .stderr(errors);
        if needs_preload() {
            command.env("LD_PRELOAD", preload()?);
        }
        let netns = config.netns.as_deref().map(netns::open).transpose()?;
        let process = Tethered::spawn(command, inherit, netns).map_err(|error| match error {
            LabError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                LabError::Missing(
                    "no linux.uml on the host: apt-get install user-mode-linux".to_owned(),
                )
            }
            other => other,
        })?;
        Guest::greet(
            lab,
            dir,
            process,
            ours,
            Transfer::HostDir(shared),
            config.boot_limit,
        )
    }
}

/// Where the guest's memory lies: shared memory if it has room, else the lab's disk.
fn memory_dir(memory_mib: u32, fallback: &Path) -> PathBuf {
    let shm = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(shm).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    // Others take of it too, and a guest that finds none later is killed: ask for plenty.
    if room > u64::from(memory_mib) << 23 {
        shm.to_path_buf()
    } else {
        fallback.to_path_buf()
    }
}

/// Whether this processor's state is larger than UML can restore; see `cli/uml-xstate.c`.
fn needs_preload() -> bool {
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" amx_tile"))
}

/// The library of the product that helps it.
fn preload() -> Result<PathBuf> {
    let library = kernel::guest_dir()?.join("lib/vnplug/libvnplug-uml-xstate.so");
    if library.is_file() {
        return Ok(library);
    }
    Err(LabError::Missing(format!(
        "no {}, which UML needs on a processor with AMX: run `make guest` first",
        library.display()
    )))
}
