//! The module as a user has it, in a directory of his own.

use std::process::{Command, Output};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};

/// What programs need in their environment to find the module and the daemon.
pub(crate) fn environment(lab: &Lab, daemon: &Daemon) -> Vec<(String, String)> {
    vnplug_e2e::station::module_environment(lab, daemon).unwrap()
}

/// Ports of the switch.
pub(crate) fn ports(daemon: &Daemon) -> u64 {
    let counters = daemon.counters();
    let is_lan0 = |name: &str| name == "lan0";
    let lan0 = counters
        .iter()
        .find(|it| it.kind == "source" && is_lan0(&it.name));
    value(lan0.unwrap(), "switch_ports")
}

/// What a program says that ends by itself; killed after a minute.
pub(crate) fn output(program: &str, args: &[&str], env: &[(String, String)]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "60", program]).args(args);
    command.envs(env.iter().cloned()).output().unwrap()
}

pub(crate) fn text_of(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}
