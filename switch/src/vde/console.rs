//! The management console, as `unixterm`, `vdeterm` and `vdecmd` know it from `vde_switch`.
//!
//! A command is a line. Its answer ends with a line `1000 Success`, or `1NNN TEXT` with an error's
//! number of Linux; lines of data come before it, after `0000 DATA END WITH '.'` and up to a line
//! with a dot. Then comes a prompt.

use std::fmt::Write;
use std::sync::Mutex;

use crate::control::{Change, Line, Told};
use crate::forward::Number;
use crate::queue::VdeConfig;
use crate::roster::{Holder, Roster, locked};
use crate::table::{Entry, Key};

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
const COMMANDS: [(&str, &str, &str); 19] = [
    ("ds", "============", "DATA SOCKET MENU"),
    ("ds/showinfo", "", "show ds info"),
    ("help", "[arg]", "Help (limited to arg when specified)"),
    ("logout", "", "logout from this mgmt terminal"),
    ("showinfo", "", "show switch version and info"),
    ("port", "============", "PORT STATUS MENU"),
    ("port/showinfo", "", "show port info"),
    ("port/sethub", "0/1", "1=HUB 0=switch"),
    ("port/print", "[N]", "print the port/endpoint table"),
    ("port/allprint", "[N]", "print the port/endpoint table"),
    ("hash", "============", "HASH TABLE MENU"),
    ("hash/showinfo", "", "show hash info"),
    ("hash/setexpire", "N", "change hash entries expire time"),
    ("hash/setminper", "N", "minimum persistence time"),
    ("hash/print", "", "print the hash table"),
    ("hash/find", "MAC [VLAN]", "MAC lookup"),
    ("counter", "============", "COUNTERS OF VNPLUG"),
    ("counter/print", "", "print what became of all frames"),
    ("shutdown", "", "refused: the daemon ends its switches"),
];

/// Errors of Linux, by number, as their texts are.
const ENXIO: (u32, &str) = (6, "No such device or address");
const EPERM: (u32, &str) = (1, "Operation not permitted");
const ENODEV: (u32, &str) = (19, "No such device");
const EINVAL: (u32, &str) = (22, "Invalid argument");
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
    /// The whole lines that are there now.
    pub(super) fn lines(&mut self, bytes: &[u8]) -> Vec<String> {
        self.line.extend_from_slice(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.line.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(&line).trim().to_owned());
        }
        if self.line.len() > MAX_LINE {
            self.line.clear();
        }
        lines
    }
}

/// Answers a command.
pub(super) fn answer(
    line: &str,
    switch: &Line,
    roster: &Mutex<Roster>,
    config: &VdeConfig,
) -> Said {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Said::Text(PROMPT.to_owned());
    }
    let (command, argument) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    if command == "logout" {
        return Said::Bye("9999 END OF SESSION".to_owned());
    }
    let did = Asked {
        switch,
        roster,
        config,
    }
    .answer(command, argument.trim());
    let mut text = match did {
        Ok(data) => data.map(|data| format!("0000 DATA END WITH '.'\n{data}.\n")),
        Err((number, text)) => return Said::Text(format!("1{number:03} {text}\n{PROMPT}")),
    }
    .unwrap_or_default();
    text.push_str("1000 Success\n");
    Said::Text(text + PROMPT)
}

type Failure = (u32, &'static str);

struct Asked<'a> {
    switch: &'a Line,
    roster: &'a Mutex<Roster>,
    config: &'a VdeConfig,
}

impl Asked<'_> {
    /// The lines of data, if the command has some.
    fn answer(&self, command: &str, argument: &str) -> Result<Option<String>, Failure> {
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
            "port/print" | "port/allprint" => self.ports(argument)?,
            "port/sethub" => {
                let on = number()?;
                self.switch.send(Change::Hub(on != 0));
                return Ok(None);
            }
            "hash/showinfo" => {
                let told = self.told()?;
                format!(
                    "Hash size {}\nGC interval 0 secs\nGC expire {} secs\nMin persistence {} secs\n",
                    told.limits.all, told.limits.age_s, told.limits.hold_s
                )
            }
            "hash/setexpire" => {
                self.switch.send(Change::Age(number()?));
                return Ok(None);
            }
            "hash/setminper" => {
                self.switch.send(Change::Hold(number()?));
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
            "shutdown" => return Err(EPERM),
            _ => return Err(ENOSYS),
        };
        Ok(Some(data))
    }

    fn told(&self) -> Result<Told, Failure> {
        self.switch.ask().ok_or(ETIMEDOUT)
    }

    fn about(&self) -> String {
        let mut text = banner();
        let _ = writeln!(text, "pid {}", std::process::id());
        if let Some((path, mode)) = &self.config.mgmt {
            let _ = writeln!(text, "mgmt {} perm 0{mode:03o}", path.display());
        }
        text
    }

    fn ports(&self, argument: &str) -> Result<String, Failure> {
        let only: Option<Number> = match argument {
            "" => None,
            text => Some(text.parse().map_err(|_| EINVAL)?),
        };
        let told = self.told()?;
        let mut text = String::new();
        for (number, counters) in &told.ports {
            if only.is_some_and(|only| only != *number) {
                continue;
            }
            // Not there: its client has gone just now.
            let Some(holder) = locked(self.roster).holder(*number).cloned() else {
                continue;
            };
            let Holder {
                owner,
                way,
                description,
                ..
            } = holder;
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "Port {number:04} untagged_vlan=0000 ACTIVE - Unnamed Allocatable\n \
                 Current User: {owner} Access Control: (User: NONE - Group: NONE)\n \
                 IN:  pkts {:>10}          bytes {:>20}\n \
                 OUT: pkts {:>10}          bytes {:>20}\n  \
                 -- endpoint ID {number:04} module {way:<12}: {description}\n              \
                 unsent packets: {}\n",
                counters.in_frames,
                counters.in_bytes,
                counters.out_frames,
                counters.out_bytes,
                counters.out_dropped,
            );
        }
        match only {
            Some(_) if text.is_empty() => Err(ENXIO),
            _ => Ok(text),
        }
    }
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
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_parts_and_an_endless_one_is_forgotten() {
        let mut console = Console::default();
        assert!(console.lines(b"port/pr").is_empty());
        assert_eq!(console.lines(b"int\r\nhelp\n"), ["port/print", "help"]);
        for _ in 0..100 {
            console.lines(&[b'x'; 100]);
        }
        assert!(console.line.len() <= MAX_LINE);
    }

    #[test]
    fn addresses_are_read_as_people_type_them() {
        let at = |vlan| Key::new([2, 0, 0, 0, 0, 0xaf], vlan);
        assert_eq!(key("02:0:0:0:0:af"), Some(at(0)));
        assert_eq!(key("02.00.00.00.00.AF 7"), Some(at(7)));
        for wrong in [
            "",
            "02:00",
            "02:0:0:0:0:af:1",
            "02:0:0:0:0:x",
            "02:0:0:0:0:af 4096",
        ] {
            assert_eq!(key(wrong), None, "{wrong}");
        }
    }
}
