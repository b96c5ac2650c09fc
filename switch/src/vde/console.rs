//! The management console, as `unixterm`, `vdeterm` and `vdecmd` know it from `vde_switch`.
//!
//! A command is a line. Its answer ends with a line `1000 Success`, or `1NNN TEXT` with an error's
//! number of Linux; lines of data come before it, after `0000 DATA END WITH '.'` and up to a line
//! with a dot. Then comes a prompt.

mod vlans;

use std::fmt::Write;
use std::time::Instant;

use crate::board::Switchboard;
use crate::config::VdeConfig;
use crate::control::{PATIENCE, PortTold, Told};
use crate::forward::{MAX_PORTS, Number};
use crate::roster::{Holder, locked};
use crate::settings::PortSettings;
use crate::table::{Entry, Key};
use crate::vde::request::MAX_REQUEST;

/// A person's connection.
#[derive(Debug, Default)]
pub(super) struct Console {
    line: Vec<u8>,
}

/// What to say to a person.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// This.
    Text(String),
    /// This, and no more.
    Bye(String),
}

/// What can be asked: the command, what follows it, what it does.
const COMMANDS: [(&str, &str, &str); 36] = [
    ("ds", "============", "DATA SOCKET MENU"),
    ("ds/showinfo", "", "show ds info"),
    ("help", "[arg]", "Help (limited to arg when specified)"),
    ("logout", "", "logout from this mgmt terminal"),
    ("showinfo", "", "show switch version and info"),
    ("port", "============", "PORT STATUS MENU"),
    ("port/showinfo", "", "show port info"),
    ("port/sethub", "0/1", "1=HUB 0=switch"),
    ("port/setvlan", "N VLAN", "set port VLAN (untagged)"),
    ("port/create", "N", "keep the port N for who asks for it"),
    ("port/remove", "N", "forget what was said of the port N"),
    ("port/epclose", "N ID", "remove the endpoint of port N"),
    (
        "port/set",
        "N KEY=VALUE",
        "settings of vnplug: vlan, trunk, lock, storm, delay, ...",
    ),
    ("port/print", "[N]", "print the port/endpoint table"),
    (
        "port/allprint",
        "[N]",
        "print the port/endpoint table, and ports without endpoint",
    ),
    ("vlan", "============", "VLAN MANAGEMENT MENU"),
    ("vlan/create", "N", "create the VLAN with tag N"),
    ("vlan/remove", "N", "remove the VLAN with tag N"),
    ("vlan/addport", "N PORT", "add port to the vlan N (tagged)"),
    (
        "vlan/delport",
        "N PORT",
        "remove port from the vlan N (tagged)",
    ),
    ("vlan/print", "[N]", "print the VLANs and their ports"),
    (
        "vlan/allprint",
        "[N]",
        "print the VLANs, and ports without endpoint",
    ),
    ("switch", "============", "THE SWITCH OF VNPLUG"),
    (
        "switch/set",
        "KEY=VALUE",
        "settings: storm, loops, static, default.KEY, ...",
    ),
    ("switch/print", "", "print the settings"),
    ("hash", "============", "HASH TABLE MENU"),
    ("hash/showinfo", "", "show hash info"),
    ("hash/setexpire", "N", "change hash entries expire time"),
    ("hash/setminper", "N", "minimum persistence time"),
    ("hash/print", "", "print the hash table"),
    ("hash/find", "MAC [VLAN]", "MAC lookup"),
    ("counter", "============", "COUNTERS OF VNPLUG"),
    ("counter/print", "", "print what became of all frames"),
    ("fstp", "============", "FAST SPANNING TREE MENU: NOT THERE"),
    (
        "fstp/setfstp",
        "0/1",
        "1 is refused; switch/set loops=shut shuts ports that loop",
    ),
    ("shutdown", "", "refused: the daemon ends its switches"),
];

/// Errors of Linux, by number, as their texts are.
const ENXIO: (u32, &str) = (6, "No such device or address");
const EPERM: (u32, &str) = (1, "Operation not permitted");
const EEXIST: (u32, &str) = (17, "File exists");
const ENODEV: (u32, &str) = (19, "No such device");
const EINVAL: (u32, &str) = (22, "Invalid argument");
/// In place of a spanning tree.
const NO_FSTP: (u32, &str) = (
    38,
    "Function not implemented: no spanning tree; switch/set loops=shut shuts ports that loop",
);
const EADDRINUSE: (u32, &str) = (98, "Address already in use");
const ENOSYS: (u32, &str) = (38, "Function not implemented");
const ETIMEDOUT: (u32, &str) = (110, "Connection timed out");

const PROMPT: &str = "\nvde$ ";
/// The longest command.
const MAX_LINE: usize = 1024;

fn banner() -> String {
    format!(
        "VDE switch V.2.3.3 (vnplugd {})\nThe socket protocol and console of Virtual Square's vde_switch\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// The first words to a person.
pub(super) fn greeting() -> String {
    banner() + PROMPT
}

impl Console {
    /// The commands that are there now. What came at once is whole, as for `vde_switch`: `vdeterm` sends no ends of lines. Only
    /// what fills a read may go on in the next.
    pub(super) fn lines(&mut self, bytes: &[u8]) -> Vec<String> {
        self.line.extend_from_slice(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.line.drain(..=end).collect();
            lines.push(command(&line));
        }
        if bytes.len() < MAX_REQUEST && !self.line.is_empty() {
            lines.push(command(&std::mem::take(&mut self.line)));
        }
        if self.line.len() > MAX_LINE {
            self.line.clear();
        }
        lines
    }
}

fn command(line: &[u8]) -> String {
    String::from_utf8_lossy(line).trim().to_owned()
}

/// Answers a command.
pub(super) fn answer(line: &str, board: &Switchboard, config: &VdeConfig) -> Said {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Said::Text(PROMPT.to_owned());
    }
    let (command, argument) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    if command == "logout" {
        return Said::Bye("9999 END OF SESSION".to_owned());
    }
    let did = Asked { board, config }.answer(command, argument.trim());
    let mut text = match did {
        Ok(data) => data.map(|data| format!("0000 DATA END WITH '.'\n{data}.\n")),
        Err(Failure { number, text }) => {
            return Said::Text(format!("1{number:03} {text}\n{PROMPT}"));
        }
    }
    .unwrap_or_default();
    text.push_str("1000 Success\n");
    Said::Text(text + PROMPT)
}

/// An error's number of Linux, and its text.
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    number: u32,
    text: String,
}

impl From<(u32, &str)> for Failure {
    fn from((number, text): (u32, &str)) -> Self {
        let text = text.to_owned();
        Self { number, text }
    }
}

impl From<String> for Failure {
    /// What was written is wrong.
    fn from(text: String) -> Self {
        Self {
            number: EINVAL.0,
            text: format!("{}: {text}", EINVAL.1),
        }
    }
}

struct Asked<'a> {
    board: &'a Switchboard,
    config: &'a VdeConfig,
}

impl Asked<'_> {
    /// The lines of data, if the command has some.
    fn answer(&self, command: &str, argument: &str) -> Result<Option<String>, Failure> {
        let board = self.board;
        let number = || argument.parse::<u32>().map_err(|_| EINVAL);
        let data = match command {
            "help" => help(argument),
            "showinfo" => self.about(),
            "ds/showinfo" => {
                let config = self.config;
                let dir = config.dir.display();
                format!("ctl dir {dir}\nstd mode 0{:03o}\n", config.mode)
            }
            "port/showinfo" => {
                let told = self.told()?;
                format!(
                    "Numports={}\nHUB={}\ncounters=true\n",
                    told.ports.len(),
                    told.is_hub
                )
            }
            "port/print" => self.ports(argument, false)?,
            "port/allprint" => self.ports(argument, true)?,
            "port/sethub" => {
                let hub = if number()? == 0 { "no" } else { "yes" };
                board.set(None, &format!("hub={hub}"))?;
                return Ok(None);
            }
            "port/set" => {
                let (port, text) = argument.split_once(char::is_whitespace).ok_or(EINVAL)?;
                board.set(Some(port_number(port)?), text)?;
                return Ok(None);
            }
            "port/setvlan" | "port/create" | "port/remove" | "port/epclose" => {
                self.change_port(command, argument)?;
                return Ok(None);
            }
            "vlan/create" | "vlan/remove" | "vlan/addport" | "vlan/delport" => {
                self.change_vlan(command, argument)?;
                return Ok(None);
            }
            "vlan/print" => self.vlans(argument, false)?,
            "vlan/allprint" => self.vlans(argument, true)?,
            "switch/set" => {
                board.set(None, argument)?;
                return Ok(None);
            }
            "switch/print" => {
                let text = locked(&board.roster).settings.to_string();
                text.split(' ').map(|pair| format!("{pair}\n")).collect()
            }
            "hash/showinfo" => {
                let told = self.told()?;
                format!(
                    "Hash size {}\nGC interval 0 secs\nGC expire {} secs\nMin persistence {} secs\n",
                    told.limits.all, told.limits.age_s, told.limits.hold_s
                )
            }
            "hash/setexpire" => {
                board.set(None, &format!("age={}", number()?))?;
                return Ok(None);
            }
            "hash/setminper" => {
                board.set(None, &format!("hold={}", number()?))?;
                return Ok(None);
            }
            "hash/print" => self.told()?.stations.iter().map(station).collect(),
            "hash/find" => {
                let key = key(argument).ok_or(EINVAL)?;
                let told = self.told()?;
                let found = told.stations.iter().find(|it| it.key == key);
                station(found.ok_or(ENODEV)?)
            }
            "counter/print" => {
                let named = self.told()?.counters.named();
                let line = |(name, value): &(String, u64)| format!("{name}={value}\n");
                named.iter().map(line).collect()
            }
            "fstp/setfstp" if argument == "0" => return Ok(None),
            fstp if fstp == "fstp" || fstp.starts_with("fstp/") => return Err(NO_FSTP.into()),
            "shutdown" => return Err(EPERM.into()),
            _ => return Err(ENOSYS.into()),
        };
        Ok(Some(data))
    }

    fn told(&self) -> Result<Told, Failure> {
        Ok(self.board.line.ask().ok_or(ETIMEDOUT)?)
    }

    /// The switch has done what it was asked for.
    fn settled(&self) -> Result<(), Failure> {
        let mut settling = self.board.settle();
        settling.is_over(Instant::now() + PATIENCE);
        match settling.is_done() {
            true => Ok(()),
            false => Err(ETIMEDOUT.into()),
        }
    }

    fn about(&self) -> String {
        let mut text = banner();
        let _ = writeln!(text, "pid {}", std::process::id());
        if let Some((path, mode)) = &self.config.mgmt {
            let _ = writeln!(text, "mgmt {} perm 0{mode:03o}", path.display());
        }
        text
    }

    /// The ports that have a client, or that something was said of, too.
    fn ports(&self, argument: &str, has_idle: bool) -> Result<String, Failure> {
        let only: Option<Number> = match argument {
            "" => None,
            text => Some(port_number(text)?),
        };
        let told = self.told()?;
        let roster = locked(&self.board.roster);
        let settings = &roster.settings;
        let mut all: Vec<Number> = told.ports.iter().map(|it| it.number).collect();
        if has_idle {
            all.extend(settings.ports.keys());
            all.sort_unstable();
            all.dedup();
        }
        let mut text = String::new();
        for number in all {
            if only.is_some_and(|only| only != number) {
                continue;
            }
            let holder = roster.holder(number);
            let told = told.ports.iter().find(|it| it.number == number);
            // One that is not there, and is told, has gone just now.
            if holder.is_some() == told.is_some() {
                let free = if settings.ports.contains_key(&number) {
                    "NOT "
                } else {
                    ""
                };
                let active = if told.is_some() { "" } else { "IN" };
                // Writing to a string cannot fail.
                let _ = writeln!(
                    text,
                    "Port {number:04} untagged_vlan={:04} {active}ACTIVE - {free}Unnamed Allocatable",
                    vlans::untagged(settings.of(number)),
                );
                self.port(&mut text, settings.of(number), holder, told);
            }
        }
        match only {
            Some(_) if text.is_empty() => Err(ENXIO.into()),
            _ => Ok(text),
        }
    }

    fn port(
        &self,
        text: &mut String,
        settings: &PortSettings,
        holder: Option<&Holder>,
        told: Option<&PortTold>,
    ) {
        let owner = holder.map_or("NONE", |holder| &holder.owner);
        let counters = told.map(|told| told.counters).unwrap_or_default();
        let _ = write!(
            text,
            " Current User: {owner} Access Control: (User: NONE - Group: NONE)\n \
             IN:  pkts {:>10}          bytes {:>20}\n \
             OUT: pkts {:>10}          bytes {:>20}\n",
            counters.in_frames, counters.in_bytes, counters.out_frames, counters.out_bytes,
        );
        if let (Some(told), Some(holder)) = (told, holder) {
            let Holder {
                way, description, ..
            } = holder;
            let _ = write!(
                text,
                "  -- endpoint ID {:04} module {way:<12}: {description}\n              \
                 unsent packets: {}\n",
                told.number,
                counters.out_full + counters.out_gone + counters.out_long,
            );
            let dropped = told.refused.named().filter(|(_, count)| *count > 0);
            for (name, count) in dropped {
                let _ = writeln!(text, "  -- {name}={count}");
            }
            if told.state != "up" {
                let _ = writeln!(text, "  -- link {}", told.state);
            }
        }
        let pairs = settings.to_string();
        if !pairs.is_empty() {
            let _ = writeln!(text, "  -- {pairs}");
        }
    }
}

/// A port's number; 0 is the host's.
fn port_number(text: &str) -> Result<Number, Failure> {
    let number = text.parse().ok();
    let number = number.filter(|number| usize::from(*number) <= MAX_PORTS);
    Ok(number.ok_or(EINVAL)?)
}

fn help(begin: &str) -> String {
    let line =
        |command: &str, syntax: &str, help: &str| format!("{command:<18} {syntax:<15} {help}\n");
    let mut text = line("COMMAND PATH", "SYNTAX", "HELP");
    text += &line("------------", "--------------", "------------");
    for (command, syntax, help) in COMMANDS {
        if command.starts_with(begin) {
            text += &line(command, syntax, help);
        }
    }
    text
}

fn station(it: &Entry) -> String {
    let [a, b, c, d, e, f] = it.key.address();
    format!(
        "Hash: {:04} Addr: {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x} VLAN {:04} to port: {:03}  age {} secs\n",
        it.slot,
        it.key.vlan(),
        it.port,
        it.age_s
    )
}

/// `MAC [VLAN]`, the address with colons or dots.
fn key(text: &str) -> Option<Key> {
    let mut words = text.split_whitespace();
    let mut address = [0; 6];
    let mut parts = words.next()?.split([':', '.']);
    for byte in &mut address {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    let vlan = words.next().map_or(Some(0), |vlan| vlan.parse().ok())?;
    (parts.next().is_none() && vlan < 4096).then(|| Key::new(address, vlan))
}

#[cfg(test)]
mod tests;
