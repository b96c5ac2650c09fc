//! Open vSwitch, which learns like ours (`NORMAL`), with DPDK or between TAPs. It is unpacked, not installed
//! (`bench/get-ovs.sh`), and has its database and its sockets in a directory of the lab.

use std::path::{Path, PathBuf};
use std::process::Command;

use vnplug_e2e::station::Running;
use vnplug_e2e::{Lab, Netns};

use crate::dpdk::awaited;
use crate::row::Result;
use crate::sys;

/// A running switch; its bridge is `br0`.
pub(super) struct Ovs {
    dir: PathBuf,
    switch: Running,
    _database: Running,
}

impl Ovs {
    /// Starts one with DPDK, whose thread that forwards has this CPU.
    pub(super) fn start(lab: &Lab, cpu: usize) -> Result<Self> {
        let (first, second) = (1u64 << sys::cpu(cpu), 1u64 << sys::cpu(1 - cpu));
        let set = [
            "dpdk-init=true".to_owned(),
            // Without huge pages there is no room for a pool that all ports share.
            "per-port-memory=true".to_owned(),
            format!("pmd-cpu-mask={first:#x}"),
            format!("dpdk-lcore-mask={second:#x}"),
            format!(
                "dpdk-extra=\"--no-huge --no-pci --legacy-mem -m 2048 --file-prefix=vnplug-bench-ovs-{}\"",
                std::process::id()
            ),
        ];
        Self::launch(lab, None, &set)
    }

    /// Starts one between interfaces of a namespace, from which it takes super-frames; without DPDK, and so
    /// without threads that never sleep.
    pub(super) fn between_taps(lab: &Lab, netns: &Netns) -> Result<Self> {
        Self::launch(lab, Some(netns), &["userspace-tso-enable=true".to_owned()])
    }

    /// Whether it is unpacked.
    pub(super) fn is_here() -> bool {
        unpacked(SWITCH).is_ok()
    }

    fn launch(lab: &Lab, netns: Option<&Netns>, set: &[String]) -> Result<Self> {
        let dir = lab.dir().join("ovs");
        std::fs::create_dir(&dir)?;
        let database = dir.join("conf.db");
        let schema = unpacked("usr/share/openvswitch/vswitch.ovsschema")?;
        let mut command = program("usr/bin/ovsdb-tool", &dir)?;
        command.arg("create").args([&database, &schema]);
        said(&mut command)?;
        let mut command = program("usr/sbin/ovsdb-server", &dir)?;
        command
            .arg(format!("--remote=punix:{}", dir.join("db.sock").display()))
            .arg(format!("--unixctl={}", dir.join("db.ctl").display()))
            .arg(&database);
        let _database = Running::start(command, lab, "ovsdb-server")?;
        awaited(&dir.join("db.sock"))?;
        let set: Vec<String> = set.iter().map(|it| format!("other_config:{it}")).collect();
        vsctl(&dir, ["--no-wait", "init"])?;
        let words = ["--no-wait", "set", "Open_vSwitch", "."];
        vsctl(
            &dir,
            words.into_iter().chain(set.iter().map(String::as_str)),
        )?;
        let mut command = program_in(netns, SWITCH, &dir)?;
        command
            .arg(format!("--unixctl={}", dir.join("switch.ctl").display()))
            .arg(remote(&dir));
        let switch = Running::start(command, lab, "ovs-vswitchd")?;
        let ovs = Self {
            dir,
            switch,
            _database,
        };
        let bridge = [
            "--timeout=40",
            "add-br",
            "br0",
            "--",
            "set",
            "bridge",
            "br0",
        ];
        vsctl(&ovs.dir, bridge.into_iter().chain(["datapath_type=netdev"]))?;
        Ok(ovs)
    }

    /// Adds a port of vhost-user; where its socket is.
    pub(super) fn vhost(&self, name: &str) -> Result<PathBuf> {
        let words = [
            "--timeout=40",
            "add-port",
            "br0",
            name,
            "--",
            "set",
            "Interface",
            name,
        ];
        vsctl(&self.dir, words.into_iter().chain(["type=dpdkvhostuser"]))?;
        Ok(self.dir.join(name))
    }

    /// Adds an interface.
    pub(super) fn interface(&self, name: &str) -> Result<()> {
        vsctl(&self.dir, ["--timeout=40", "add-port", "br0", name])
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.switch.pid()
    }

    /// Frames that its threads took so far.
    pub(super) fn received(&self) -> Result<u64> {
        let mut command = program("usr/bin/ovs-appctl", &self.dir)?;
        command.arg("-t").arg(self.dir.join("switch.ctl"));
        let said = said(command.arg("dpif-netdev/pmd-stats-show"))?;
        let lines = said
            .lines()
            .filter_map(|line| line.trim().strip_prefix("packets received:"));
        let counts = lines.map(|count| count.trim().parse::<u64>());
        let counts: std::result::Result<Vec<u64>, _> = counts.collect();
        Ok(counts?.iter().sum())
    }
}

fn remote(dir: &Path) -> String {
    format!("unix:{}", dir.join("db.sock").display())
}

fn vsctl<'a>(dir: &Path, words: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let mut command = program("usr/bin/ovs-vsctl", dir)?;
    command.arg(format!("--db={}", remote(dir))).args(words);
    said(&mut command).map(drop)
}

fn said(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() {
        true => Ok(said),
        false => {
            let errors = String::from_utf8_lossy(&output.stderr);
            Err(format!("{}: {errors}", command.get_program().display()).into())
        }
    }
}

/// One of its programs, with all its files in `dir`.
fn program(name: &str, dir: &Path) -> Result<Command> {
    program_in(None, name, dir)
}

fn program_in(netns: Option<&Netns>, name: &str, dir: &Path) -> Result<Command> {
    let mut command = match netns {
        Some(netns) => netns.command(unpacked(name)?),
        None => Command::new(unpacked(name)?),
    };
    for variable in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"] {
        command.env(variable, dir);
    }
    command.env("OVS_PKGDATADIR", unpacked("usr/share/openvswitch")?);
    Ok(command)
}

fn unpacked(name: &str) -> Result<PathBuf> {
    let path = PathBuf::from("target/ovs").join(name);
    match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(error) => Err(format!("{}: {error}; run bench/get-ovs.sh", path.display()).into()),
    }
}

const SWITCH: &str = "usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
