//! Machines on a switch, as far as a network namespace with one interface is one.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;
use vnplug_testing::{PATIENCE, eventually, until};

use crate::daemon::{Daemon, program};
use crate::{Lab, LabError, Netns, Result};

/// A program, what it prints in files of the lab; killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    out: PathBuf,
    errors: PathBuf,
}

impl Running {
    /// Starts it; `name` is that of its files.
    ///
    /// # Errors
    /// The system's.
    pub fn start(mut command: Command, lab: &Lab, name: &str) -> Result<Self> {
        let [out, errors] = ["out", "err"].map(|it| lab.dir().join(format!("{name}.{it}")));
        let what = || LabError::io(format!("start {name}"));
        let file = |path: &Path| File::create(path).map_err(what());
        // The switch of VDE ends with its input.
        command.stdin(Stdio::piped()).stdout(file(&out)?);
        command.stderr(file(&errors)?);
        let child = command.spawn().map_err(what())?;
        Ok(Self { child, out, errors })
    }

    /// Debian's `vde_switch` of this directory, in `netns` if given, once programs can join; `more` are
    /// further arguments.
    ///
    /// # Errors
    /// The lab's, and what it says if it ends.
    pub fn vde_switch(lab: &Lab, netns: Option<&Netns>, dir: &Path, more: &[&str]) -> Result<Self> {
        let program = "vde_switch";
        let mut command = match netns {
            Some(netns) => netns.command(program),
            None => Command::new(program),
        };
        command.arg("-s").arg(dir).args(more);
        let mut switch = Self::start(command, lab, program)?;
        eventually("vde_switch is there", || {
            if let Some(status) = switch.status() {
                panic!("vde_switch: {status}: {}", switch.errors());
            }
            dir.join("ctl").exists()
        });
        Ok(switch)
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Types this into it.
    ///
    /// # Errors
    /// It does not read any more.
    pub fn says(&mut self, text: &str) -> Result<()> {
        let input = self.child.stdin.as_mut();
        let said = input.map_or(Ok(()), |input| input.write_all(text.as_bytes()));
        said.map_err(LabError::io("type into a program"))
    }

    /// What it printed so far.
    #[must_use]
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// What it said on its standard error so far.
    #[must_use]
    pub fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// Waits until it says that it listens: where.
    ///
    /// # Panics
    /// If it does not say so.
    #[must_use]
    pub fn listens_at(&self) -> String {
        let address = |said: &String| {
            let (_, behind) = said.split_once("listening at ")?;
            let (address, _) = behind.split_once(char::is_whitespace)?;
            Some(address.to_owned())
        };
        let listens = |said: &String| address(said).is_some();
        let said = until("it listens", || self.errors(), listens);
        address(&said).unwrap_or_default()
    }

    /// The last line that it printed, of JSON.
    #[must_use]
    pub fn last(&self) -> Value {
        let text = self.output();
        let line = text.lines().next_back().unwrap_or_default();
        serde_json::from_str(line).unwrap_or_default()
    }

    /// Ends it by SIGTERM.
    ///
    /// # Panics
    /// If it does not end.
    pub fn finish(&mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let ended = until("it ends", || self.status(), Option::is_some);
        ended.unwrap_or_default()
    }

    /// Ends it by SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// How it ended, if it did.
    pub fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A namespace with one interface, whose cable ends in a switch.
#[derive(Debug)]
pub struct Station {
    /// The namespace.
    pub netns: Netns,
    /// The interface's IPv4 address, of a /24.
    pub address: String,
    /// The interface's name.
    pub interface: &'static str,
    /// What holds the interface.
    pub cable: Running,
}

impl Station {
    /// One that `vde_plug2tap` joins to the switch of a directory.
    ///
    /// # Errors
    /// The lab's.
    pub fn by_vde(lab: &Lab, switch: &Path, address: &str) -> Result<Self> {
        Self::by_plug(lab, switch, &[], address)
    }

    /// As [`by_vde`](Self::by_vde), by any address that libvdeplug knows, and with this in the program's
    /// environment.
    ///
    /// # Errors
    /// The lab's.
    pub fn by_plug(
        lab: &Lab,
        url: impl AsRef<OsStr>,
        env: &[(String, String)],
        address: &str,
    ) -> Result<Self> {
        let netns = Netns::new()?;
        let mut plug = netns.command("vde_plug2tap");
        plug.arg("-s").arg(url).arg("tap0");
        plug.envs(env.iter().cloned());
        Self::new(netns, lab, plug, "tap0", address)
    }

    /// One that `vnplug nic` joins to a switch of a daemon, from outside the namespace.
    ///
    /// # Errors
    /// The lab's.
    pub fn by_nic(
        lab: &Lab,
        daemon: &Daemon,
        switch: &str,
        address: &str,
        more: &[&str],
    ) -> Result<Self> {
        let netns = Netns::new()?;
        let mut nic = Command::new(program("vnplug")?);
        nic.arg("--socket").arg(daemon.socket());
        nic.args(["nic", switch, "--name", "vn0", "--json", "--netns"]);
        nic.arg(netns.name()).args(more);
        Self::new(netns, lab, nic, "vn0", address)
    }

    fn new(
        netns: Netns,
        lab: &Lab,
        cable: Command,
        interface: &'static str,
        address: &str,
    ) -> Result<Self> {
        let mut cable = Running::start(cable, lab, &format!("station-{address}"))?;
        eventually("the interface is there", || {
            if let Some(status) = cable.status() {
                panic!("{address}: {status}: {}", cable.errors());
            }
            netns.ip(&["link", "show", interface]).is_ok()
        });
        let with_prefix = format!("{address}/24");
        netns.ip(&["addr", "add", &with_prefix, "dev", interface])?;
        netns.ip(&["link", "set", interface, "up", "arp", "on"])?;
        Ok(Self {
            netns,
            address: address.to_owned(),
            interface,
            cable,
        })
    }

    /// A statistic of its interface, as `rx_packets`.
    ///
    /// # Panics
    /// If the interface is gone.
    #[must_use]
    pub fn statistic(&self, name: &str) -> u64 {
        let file = format!("/sys/class/net/{}/statistics/{name}", self.interface);
        let text = self.netns.exec(&["cat", &file]);
        let number = text.ok().and_then(|text| text.trim().parse().ok());
        number.unwrap_or_else(|| panic!("{file}: no number"))
    }

    /// Whether another address answers three times.
    #[must_use]
    pub fn pings(&self, address: &str) -> bool {
        pings(&self.netns, address, &[])
    }

    /// Sends this to another one, by TCP; what that one has received.
    ///
    /// # Errors
    /// The lab's.
    pub fn sends(&self, other: &Self, bytes: &[u8]) -> Result<Vec<u8>> {
        transfer(&self.netns, &other.netns, &other.address, bytes)
    }
}

/// What programs of libvdeplug need in their environment to find our module, of which the lab gets a
/// copy, and the daemon.
///
/// # Errors
/// [`LabError::Missing`] if the module was not built; the system's.
pub fn module_environment(lab: &Lab, daemon: &Daemon) -> Result<Vec<(String, String)>> {
    let name = "libvdeplug_vnplug.so";
    let dir = lab.dir().join("modules");
    if !dir.exists() {
        let what = || LabError::io(format!("copy {name}"));
        std::fs::create_dir(&dir).map_err(what())?;
        std::fs::copy(program(name)?, dir.join(name)).map_err(what())?;
    }
    let path = format!("{}:{DEBIAN_MODULES}", dir.display());
    let socket = daemon.socket().display().to_string();
    Ok(vec![
        ("VDEPLUGIN_PATH".into(), path),
        ("VNPLUG_SOCKET".into(), socket),
    ])
}

/// Whether an address answers three times in a namespace; `more` are further arguments of ping.
#[must_use]
pub fn pings(netns: &Netns, address: &str, more: &[&str]) -> bool {
    let args = ["ping", "-q", "-c", "3", "-i", "0.2", "-W", "5"];
    netns.exec(&[&args, more, &[address]].concat()).is_ok()
}

/// One ping after the other without a pause; those that were answered.
#[must_use]
pub fn answered(from: &Netns, to: &str, count: u32) -> u32 {
    let count_text = count.to_string();
    let words = [
        "ping",
        "-q",
        "-c",
        &count_text,
        "-i",
        "0.002",
        "-W",
        "1",
        to,
    ];
    let text = from.exec(&words).unwrap_or_default();
    let line = text.lines().find(|line| line.contains("received"));
    let received = line.and_then(|line| line.split(", ").nth(1)?.split(' ').next()?.parse().ok());
    received.unwrap_or(0)
}

/// Sends this from one namespace to an address of another, by TCP; what arrived there.
///
/// # Errors
/// The lab's.
pub fn transfer(from: &Netns, to: &Netns, address: &str, bytes: &[u8]) -> Result<Vec<u8>> {
    let what = || LabError::io(format!("TCP to {address}"));
    let address = format!("{address}:7000");
    let bind = || TcpListener::bind(&address);
    let listener = to.enter(bind)?.map_err(what())?;
    std::thread::scope(|scope| {
        let received = scope.spawn(move || -> io::Result<Vec<u8>> {
            let mut all = Vec::new();
            let (mut stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.read_to_end(&mut all)?;
            Ok(all)
        });
        let mut stream = from
            .enter(|| TcpStream::connect(&address))?
            .map_err(what())?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(what())?;
        stream.write_all(bytes).map_err(what())?;
        drop(stream);
        let received = received.join();
        received
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            .map_err(what())
    })
}

/// Bytes that differ everywhere.
#[must_use]
pub fn content(len: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Where Debian has libvdeplug's own modules.
const DEBIAN_MODULES: &str = "/usr/lib/x86_64-linux-gnu/vdeplug";
