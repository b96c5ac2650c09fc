//! libvirt's own daemon, on a host of its own that is made of namespaces, and guests that are domains of it.
//!
//! Nothing of the machine's is touched: `/etc` is a copy of a few files, `/run`, `/var` and `/dev/shm` are empty, the network is a
//! namespace's, and everything ends with the test. QEMU runs as `libvirt-qemu`, as Debian's packages have it. There is no
//! service manager, so QEMU's output goes to files and not to virtlogd, and there are no cgroups; no AppArmor either.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::channel::{Channel, Job, Output, console_tail};
use crate::child::Tethered;
use crate::daemon::{Daemon, program};
use crate::error::{LabError, Result};
use crate::image::Image;
use crate::initramfs::{self, Wires};
use crate::kernel;
use crate::lab::Lab;
use crate::netns::Netns;
use crate::qemu::Machine;
use crate::raw::children;

/// A host with libvirt.
#[derive(Debug)]
pub struct Libvirt {
    /// What the host's programs say, its kernel and initramfs, its `/etc`.
    dir: PathBuf,
    /// A process in it.
    pid: u32,
    process: Tethered,
    _netns: Netns,
    // Last: its directory outlives it.
    _lab: Lab,
}

/// A domain that runs.
#[derive(Debug)]
pub struct Domain {
    channel: Arc<Channel>,
    console: PathBuf,
}

impl Libvirt {
    /// Starts libvirtd, on a host of this name.
    ///
    /// # Errors
    /// [`LabError::Missing`] where it is not installed; [`LabError::Boot`] with what it said, if it does not serve.
    pub fn start(lab: &Lab, name: &str) -> Result<Self> {
        for file in ["/usr/sbin/libvirtd", "/usr/bin/virsh", DRIVER] {
            if !Path::new(file).exists() {
                let packages = "libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients";
                return Err(LabError::Missing(format!(
                    "no {file}: apt-get install {packages}"
                )));
            }
        }
        let dir = lab.dir().join(name);
        fs::create_dir(&dir).map_err(LabError::io(format!("make {}", dir.display())))?;
        for open in [lab.dir(), &dir] {
            let mode = Permissions::from_mode(0o755);
            fs::set_permissions(open, mode).map_err(LabError::io("open the directory"))?;
        }
        fill(&dir)?;
        let netns = Netns::new()?;
        let said = File::create(dir.join(SAID)).map_err(LabError::io("make libvirtd's log"))?;
        let errors = said.try_clone().map_err(LabError::io("libvirtd's log"))?;
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ])
            .args(["sh", "-c", include_str!("guest/libvirt.sh"), "libvirt"])
            .arg(&dir)
            // Hooks have it, too.
            .env("PATH", path(&dir))
            .stdin(Stdio::null())
            .stdout(said)
            .stderr(errors);
        let inside = crate::netns::open(netns.name())?;
        let process = Tethered::spawn(command, Vec::new(), Some(inside))?;
        let mut libvirt = Self {
            dir,
            pid: 0,
            process,
            _netns: netns,
            _lab: lab.clone(),
        };
        let deadline = Instant::now() + START;
        loop {
            libvirt.pid = first_child(libvirt.process.pid()).unwrap_or_default();
            if libvirt.pid > 0 && libvirt.virsh(&["list"]).0 == Some(0) {
                return Ok(libvirt);
            }
            let ended = libvirt.process.try_wait().is_some();
            if ended || Instant::now() >= deadline {
                let console = libvirt.said();
                return Err(LabError::Boot {
                    what: "libvirtd".to_owned(),
                    console,
                    ended,
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What its programs said so far.
    #[must_use]
    pub fn said(&self) -> String {
        fs::read_to_string(self.dir.join(SAID)).unwrap_or_default()
    }

    /// A file of this host, as others see it.
    #[must_use]
    pub fn file(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.pid))
    }

    /// The socket of libvirtd, for others.
    #[must_use]
    pub fn uri(&self) -> String {
        format!(
            "qemu+unix:///system?socket={}/libvirt-sock",
            self.dir.display()
        )
    }

    /// A program that runs on this host.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = on(self.pid, &self.dir);
        command.arg(program).stdin(Stdio::null());
        command
    }

    /// From now on `ssh` here, whichever host it names, runs commands on that one: as long as the result lives.
    ///
    /// # Errors
    /// The system's.
    pub fn reaches(&self, other: &Self) -> Result<Ssh> {
        let calls = self.dir.join("ssh");
        let made = Command::new("mkfifo").arg(&calls).status();
        made.map_err(LabError::io("make a FIFO"))?;
        let script = include_str!("guest/ssh.sh").replace("CALLS", &calls.display().to_string());
        let at = self.dir.join("bin/ssh");
        fs::write(&at, script)
            .and_then(|()| fs::set_permissions(&at, Permissions::from_mode(0o755)))
            .map_err(LabError::io("make ssh"))?;
        // For both, so that it does not end between two calls.
        let fifo = File::options().read(true).write(true).open(&calls);
        let fifo = fifo.map_err(LabError::io("open a FIFO"))?;
        let (pid, dir) = (other.pid, other.dir.clone());
        let serves = std::thread::spawn(move || {
            let lines = BufReader::new(fifo).lines().map_while(std::io::Result::ok);
            for call in lines.take_while(|line| !line.is_empty()) {
                let streams = format!("exec \"$@\" <{call}/in >{call}/out 2>{call}/err");
                let words = fs::read_to_string(format!("{call}/words")).unwrap_or_default();
                let run = on(pid, &dir);
                let mut command = Command::new("sh");
                command.args(["-c", &streams, "ssh"]).arg(run.get_program());
                command.args(run.get_args()).args(["sh", "-c", &words]);
                for (name, value) in run.get_envs() {
                    command.env(name, value.unwrap_or_default());
                }
                if let Ok(mut child) = command.spawn() {
                    std::thread::spawn(move || child.wait());
                }
            }
        });
        Ok(Ssh {
            calls,
            serves: Some(serves),
        })
    }

    /// Runs `virsh`; its exit code, and what it says on both outputs.
    ///
    /// # Panics
    /// If it cannot be run.
    #[must_use]
    pub fn virsh(&self, words: &[&str]) -> (Option<i32>, String) {
        let mut command = self.command("virsh");
        heard(command.arg("--quiet").args(words))
    }

    /// Runs `virsh`, which succeeds; what it says.
    ///
    /// # Panics
    /// If it does not.
    pub fn ok(&self, words: &[&str]) -> String {
        let (code, said) = self.virsh(words);
        assert_eq!(code, Some(0), "virsh {words:?}: {said}\n{}", self.said());
        said
    }

    /// Runs `vnplug` here.
    ///
    /// # Panics
    /// If it was not built.
    #[must_use]
    pub fn vnplug(&self, words: &[&str]) -> (Option<i32>, String) {
        let mut command = self.command("vnplug");
        heard(command.args(words))
    }

    /// Starts a daemon on this host, whose pools are in its `/dev/shm` and which programs find where they look for it.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn daemon(&self, lab: &Lab, args: &[&str]) -> Result<Daemon> {
        let args = [args, &["--pool-dir", "/dev/shm"]].concat();
        let mut daemon = Daemon::unstarted(lab, None, &args)?;
        daemon.set_host(self.pid);
        daemon.launch()?;
        let usual = self.file("/run/vnplug/vnplug.sock");
        symlink(daemon.socket(), usual).map_err(LabError::io("link the daemon's socket"))?;
        Ok(daemon)
    }

    /// Defines a domain of this board that boots this image; its UUID.
    ///
    /// # Errors
    /// [`LabError::Missing`] without the guest's kernel.
    ///
    /// # Panics
    /// If libvirt does not take it.
    pub fn define(&self, name: &str, machine: Machine, image: &Image) -> Result<String> {
        let [kernel, initrd, xml] = ["kernel", "initrd", "domain.xml"].map(|it| self.dir.join(it));
        // A copy: libvirt makes QEMU's user its owner.
        fs::copy(kernel::qemu_kernel()?, &kernel).map_err(LabError::io("copy the kernel"))?;
        let modules = ["virtio_pci", "virtio_console", "af_packet"];
        let tree = kernel::qemu_modules()?;
        initramfs::build(&initrd, image, Wires::Qemu, &tree, &modules, Path::new(""))?;
        let (board, ports) = match machine {
            Machine::Pc => ("pc", 0),
            Machine::Q35 { root_ports } => ("q35", root_ports),
        };
        let mut text = DOMAIN.replace("NAME", name);
        text = text.replace("BOARD", board);
        let root = match ports {
            0 => "",
            _ => "<controller type='pci' index='0' model='pcie-root'/>",
        };
        text = text.replace("PORTS", &(root.to_owned() + &PORT.repeat(ports as usize)));
        for (word, path) in [("KERNEL", &kernel), ("INITRD", &initrd)] {
            text = text.replace(word, &path.display().to_string());
        }
        fs::write(&xml, text).map_err(LabError::io("write a domain's definition"))?;
        self.ok(&["define", &xml.display().to_string()]);
        Ok(self.ok(&["domuuid", name]).trim().to_owned())
    }

    /// Starts a domain and waits until it serves commands.
    ///
    /// # Errors
    /// [`LabError::Boot`] with the console's end, or with why libvirt does not start it.
    pub fn boot(&self, name: &str) -> Result<Domain> {
        let (code, said) = self.virsh(&["start", name]);
        if code != Some(0) {
            return Err(LabError::Boot {
                what: said,
                console: self.said(),
                ended: true,
            });
        }
        let console = self.file(CONSOLE);
        let channel = Channel::new(self.commands()?, &console)?;
        if !channel.greeted(BOOT) {
            return Err(LabError::Boot {
                what: format!("{name} did not boot within {BOOT:?}"),
                console: console_tail(&console, 100),
                ended: channel.is_closed(),
            });
        }
        Ok(Domain { channel, console })
    }

    /// A domain that ran elsewhere, when it has come here.
    ///
    /// # Errors
    /// [`LabError::Io`] if it is not there.
    pub fn arrived(&self, before: &Domain) -> Result<Domain> {
        let console = self.file(CONSOLE);
        let channel = Channel::following(&before.channel, self.commands()?, &console)?;
        Ok(Domain { channel, console })
    }

    fn commands(&self) -> Result<UnixStream> {
        UnixStream::connect(self.file("/run/lab/commands"))
            .map_err(LabError::io("the domain's channel"))
    }

    /// Has libvirtd end, and waits until another one serves.
    ///
    /// # Panics
    /// If it does not.
    pub fn restart(&self) {
        let pid = || fs::read_to_string(self.file("/run/libvirtd.pid")).unwrap_or_default();
        let old = pid();
        let end = heard(self.command("kill").arg(old.trim()));
        assert_eq!(end.0, Some(0), "{}", end.1);
        vnplug_testing::eventually("another libvirtd serves", || {
            let now = pid();
            !now.is_empty() && now != old && self.virsh(&["list"]).0 == Some(0)
        });
    }
}

/// See [`Libvirt::reaches`].
#[derive(Debug)]
pub struct Ssh {
    calls: PathBuf,
    serves: Option<JoinHandle<()>>,
}

impl Drop for Ssh {
    fn drop(&mut self) {
        let told = File::options().append(true).open(&self.calls);
        let told = told.and_then(|mut fifo| fifo.write_all(b"\n"));
        if let (Ok(()), Some(serves)) = (told, self.serves.take()) {
            // A panic there has been told.
            let _ = serves.join();
        }
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // A test that fails tells what there is to tell: nobody can look any more.
        if std::thread::panicking() {
            eprintln!("{} says:\n{}", self.dir.display(), self.said());
        }
    }
}

impl Domain {
    /// Runs a shell command and waits for its end.
    ///
    /// # Errors
    /// As [`Guest::run`](crate::Guest::run).
    pub fn run(&self, command: &str, limit: Duration) -> Result<Output> {
        self.spawn(command)?.wait(limit)
    }

    /// Starts a shell command in the guest and returns at once.
    ///
    /// # Errors
    /// [`LabError::GuestGone`].
    pub fn spawn(&self, command: &str) -> Result<Job> {
        Channel::start(&self.channel, command)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "the domain's console ends:\n{}",
                console_tail(&self.console, 30)
            );
        }
    }
}

/// Runs the program that is named next on a host of this process and this directory.
fn on(pid: u32, dir: &Path) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--target={pid}"))
        .args(["--mount", "--uts", "--pid", "--net", "--"])
        // A libvirtd that hangs ends the test, and says where.
        .args(["timeout", "--kill-after=5", "120"])
        .env("PATH", path(dir))
        .env("LIBVIRT_DEFAULT_URI", "qemu:///system")
        .env("LC_ALL", "C");
    command
}

/// The host's `/etc`, what libvirtd and QEMU read of this machine's, with QEMU's user in it, and its programs.
fn fill(dir: &Path) -> Result<()> {
    let [etc, bin] = ["etc", "bin"].map(|it| dir.join(it));
    fs::create_dir(&etc).map_err(LabError::io("make the host's /etc"))?;
    let there = ETC.map(|it| Path::new("/etc").join(it));
    let there = there.iter().filter(|it| it.symlink_metadata().is_ok());
    let copied = Command::new("cp").arg("-a").args(there).arg(&etc).status();
    copied.map_err(LabError::io("copy files of /etc"))?;
    let append = |file: &str, line: &str| {
        let text = fs::read_to_string(etc.join(file)).unwrap_or_default();
        let text = match text.contains("\nlibvirt-qemu:") {
            true => text,
            false => format!("{text}{line}\n"),
        };
        fs::write(etc.join(file), text)
    };
    let written = append(
        "passwd",
        "libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin",
    )
    .and_then(|()| append("group", "libvirt-qemu:x:64055:"))
    .and_then(|()| fs::create_dir_all(etc.join("libvirt/hooks/qemu.d")))
    .and_then(|()| fs::create_dir_all(etc.join("vnplug/vms")))
    .and_then(|()| fs::create_dir(&bin))
    .and_then(|()| {
        let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let text = LIBVIRTD.replace("UUID", uuid.trim());
        let text = text.replace("DIR", &dir.display().to_string());
        fs::write(etc.join("libvirt/libvirtd.conf"), text)
    })
    .and_then(|()| fs::write(etc.join("libvirt/qemu.conf"), QEMU));
    written.map_err(LabError::io("fill the host's /etc"))?;
    // What the hook says has no journal to go to.
    let logger = format!("#!/bin/sh\necho \"$@\" >>{}\n", dir.join(SAID).display());
    let logger_at = bin.join("logger");
    fs::write(&logger_at, logger)
        .and_then(|()| fs::set_permissions(&logger_at, Permissions::from_mode(0o755)))
        .and_then(|()| symlink(program("vnplug").unwrap_or_default(), bin.join("vnplug")))
        .map_err(LabError::io("fill the host's programs"))
}

/// Exit code, and both outputs.
fn heard(command: &mut Command) -> (Option<i32>, String) {
    let output = command
        .output()
        .expect("nsenter is part of Debian's util-linux");
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.code(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

/// Where programs are on the host of this directory.
fn path(dir: &Path) -> String {
    let ours = std::env::var("PATH").unwrap_or_default();
    format!("{}:{ours}:/usr/sbin:/sbin", dir.join("bin").display())
}

fn first_child(pid: u32) -> Option<u32> {
    children(pid).first().copied()
}

/// What is read of this machine's `/etc`: users, names of services, libraries, libvirt's own. No passwords, no keys.
const ETC: [&str; 13] = [
    "alternatives",
    "group",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "libvirt",
    "machine-id",
    "nsswitch.conf",
    "passwd",
    "protocols",
    "sasl2",
    "services",
];
const DRIVER: &str = "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so";
/// What libvirtd and the hook said, in the host's directory.
const SAID: &str = "said";
const CONSOLE: &str = "/run/lab/console";
const START: Duration = Duration::from_secs(60);
const BOOT: Duration = Duration::from_secs(300);

const LIBVIRTD: &str = r#"unix_sock_dir = "DIR"
auth_unix_rw = "none"
host_uuid = "UUID"
log_outputs = "3:stderr"
"#;
const QEMU: &str = r#"stdio_handler = "file"
cgroup_controllers = []
security_driver = "none"
"#;
const PORT: &str = "<controller type='pci' model='pcie-root-port'/>";
const DOMAIN: &str = "<domain type='qemu'>
  <name>NAME</name>
  <memory unit='MiB'>256</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='BOARD'>hvm</type>
    <kernel>KERNEL</kernel>
    <initrd>INITRD</initrd>
    <cmdline>console=ttyS0 quiet panic=-1 no_timer_check</cmdline>
  </os>
  <features><acpi/></features>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>PORTS
    <serial type='file'><source path='/run/lab/console'/><target port='0'/></serial>
    <channel type='unix'><source mode='bind' path='/run/lab/commands'/><target type='virtio' name='lab.cmd'/></channel>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
  </devices>
</domain>
";
