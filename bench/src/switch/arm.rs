//! The two switches that are measured: a daemon's, and Debian's `vde_switch`.

use std::path::PathBuf;
use std::time::Duration;

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::station::Running;

use crate::attached::cpu_time;
use crate::row::Result;
use crate::sys;

/// A switch that programs of VDE join.
pub(super) struct Arm {
    /// Its name in what is told.
    pub(super) name: &'static str,
    /// The directory of its sockets.
    pub(super) dir: PathBuf,
    process: Process,
}

enum Process {
    Daemon(Daemon),
    VdeSwitch(Running),
}

impl Arm {
    /// A daemon's switch `lan0` for this number of `ports`, whose thread has one CPU if that is given.
    pub(super) fn ours(lab: &Lab, ports: usize, cpu: Option<usize>) -> Result<Self> {
        let dir = lab.dir().join("lan0.ctl");
        let cpus = cpu.map_or_else(String::new, |cpu| format!(",cpus={cpu}"));
        let spec = format!("lan0,vde={},ports={ports}{cpus}", dir.display());
        let daemon = Daemon::start(lab, None, &["--switch", &spec])?;
        Ok(Self {
            name: "vNPlug",
            dir,
            process: Process::Daemon(daemon),
        })
    }

    /// A `vde_switch` for this number of `ports`, on one CPU if that is given.
    pub(super) fn theirs(lab: &Lab, ports: usize, cpu: Option<usize>) -> Result<Self> {
        let dir = lab.dir().join("vde.ctl");
        // It gives nobody the number 0.
        let ports = (ports + 1).to_string();
        let switch = Running::vde_switch(lab, None, &dir, &["-n", &ports])?;
        cpu.map_or(Ok(()), |cpu| sys::pin_process(switch.pid(), cpu))?;
        Ok(Self {
            name: PEER,
            dir,
            process: Process::VdeSwitch(switch),
        })
    }

    /// Both, ours first.
    pub(super) fn both(lab: &Lab, ports: usize, cpu: Option<usize>) -> Result<[Self; 2]> {
        Ok([Self::ours(lab, ports, cpu)?, Self::theirs(lab, ports, cpu)?])
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        match &self.process {
            Process::Daemon(daemon) => daemon.pid(),
            Process::VdeSwitch(switch) => switch.pid(),
        }
    }

    /// Processor time of all its threads.
    pub(super) fn cpu_time(&self) -> Result<Duration> {
        cpu_time(self.pid())
    }
}

/// The peer's name in the table.
pub(super) const PEER: &str = "vde_switch";
