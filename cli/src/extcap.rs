//! `vnplug extcap`: what Wireshark asks of a program that brings interfaces
//! (<https://www.wireshark.org/docs/wsdg_html_chunked/ChCaptureExtcap.html>).
//!
//! Wireshark runs the program once per question and reads lines from its standard output; to capture, it
//! lets it write pcapng into a FIFO. That is `vnplug dump`, so this only translates.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser};
use rustix::io::Errno;
use vnplug::{Client, Device, Error, PortOptions};

use crate::capture::dump::Dump;
use crate::extract::Extract;
use crate::failure::{Failure, OK, Outcome};
use crate::{out, text};

/// Serves Wireshark and tshark as an external capture program (extcap).
#[derive(Debug, Args)]
#[command(after_help = "\
Install for one user (Wireshark 4.2 or newer; docs/extcap.md has the other ways):
  mkdir -p ~/.local/lib/wireshark/extcap
  ln -s \"$(command -v vnplug)\" ~/.local/lib/wireshark/extcap/vnplug-extcap

Then Wireshark lists the devices of the daemon, and this captures ten packets:
  tshark -i vnplug-host:eth1 -c 10

The interface vnplug_recording opens what `vnplug record` wrote; its options say which.")]
pub(crate) struct Extcap {
    /// List the interfaces
    #[arg(long)]
    extcap_interfaces: bool,
    /// Which Wireshark asks
    #[arg(long, value_name = "VERSION")]
    extcap_version: Option<String>,
    /// The interface that is meant
    #[arg(long, value_name = "NAME")]
    extcap_interface: Option<String>,
    /// List the link types of the interface
    #[arg(long)]
    extcap_dlts: bool,
    /// List the options of the interface
    #[arg(long)]
    extcap_config: bool,
    /// Capture filter; without --capture it is only checked
    #[arg(long, value_name = "EXPRESSION", allow_hyphen_values = true)]
    extcap_capture_filter: Option<String>,
    /// Capture
    #[arg(long, requires_all = ["extcap_interface", "fifo"])]
    capture: bool,
    /// Where the packets go
    #[arg(long, value_name = "PATH")]
    fifo: Option<PathBuf>,
    /// Bytes to capture of each packet, 0 = all
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    snaplen: u32,
    /// One packet in N of those that pass the filter
    #[arg(long, value_name = "N", default_value_t = 1)]
    sample: u32,
    /// Packets the interface received (rx), sent (tx), or both
    #[arg(long, value_name = "WHICH", default_value = "both")]
    direction: String,
    /// Of a recording: its directories, with colons between them
    #[arg(long, value_name = "DIR", default_value = "")]
    recording: String,
    /// Of a recording: packets from this time on
    #[arg(
        long,
        value_name = "TIME",
        default_value = "",
        allow_hyphen_values = true
    )]
    from: String,
    /// Of a recording: packets before this time
    #[arg(
        long,
        value_name = "TIME",
        default_value = "",
        allow_hyphen_values = true
    )]
    to: String,
}

/// A program called by this name is `vnplug extcap`: Wireshark gives no first argument of ours.
pub(crate) const PROGRAM: &str = "vnplug-extcap";

/// The command line, with `extcap` put in if we were called by that name.
pub(crate) fn arguments(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    let called = words.first().map(Path::new).and_then(Path::file_name);
    if called.is_some_and(|name| name == PROGRAM) {
        words.insert(1, "extcap".into());
    }
    words
}

impl Extcap {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        if self.extcap_interfaces {
            return list(socket);
        }
        let Some(interface) = &self.extcap_interface else {
            return Err(Failure::new(
                "this serves Wireshark; `vnplug extcap --help` says how to install it",
            ));
        };
        let device = interface.strip_prefix(PREFIX).unwrap_or(interface);
        if interface == RECORDING {
            return self.recording();
        }
        if self.capture {
            return self.capture(device, socket);
        }
        if self.extcap_dlts {
            return dlts(device, socket);
        }
        if self.extcap_config {
            out::raw(&config(socket))?;
            return Ok(OK);
        }
        match &self.extcap_capture_filter {
            Some(filter) => check(device, filter, socket),
            None => Ok(OK),
        }
    }

    fn capture(&self, device: &str, socket: &Path) -> Outcome {
        let mut words = self.words("dump");
        for (name, value) in [
            ("--snaplen", self.snaplen.to_string()),
            ("--sample", self.sample.to_string()),
            ("--direction", self.direction.clone()),
            ("--filter", self.filter().to_owned()),
        ] {
            // In one word, so that no value is taken for an option.
            words.push(format!("{name}={value}").into());
        }
        words.extend(["--".into(), device.into()]);
        translated::<Dump>(words)?.run(socket)
    }

    /// Answers about the interface that stands for recordings, or extracts from one.
    fn recording(&self) -> Outcome {
        if self.extcap_dlts {
            out::raw(ETHERNET)?;
        } else if self.extcap_config {
            out::raw(RECORDING_CONFIG)?;
        } else if self.capture {
            if self.recording.is_empty() {
                return Err(Failure::new(
                    "which recording? Set its directory in the options of the interface",
                ));
            }
            let mut words = self.words("extract");
            for (name, value) in [("--from", &self.from), ("--to", &self.to)] {
                if !value.is_empty() {
                    words.push(format!("{name}={value}").into());
                }
            }
            words.push("--".into());
            words.extend(self.recording.split(':').map(OsString::from));
            if !self.filter().is_empty() {
                words.push(self.filter().into());
            }
            return translated::<Extract>(words)?.run();
        }
        Ok(OK)
    }

    fn filter(&self) -> &str {
        let filter = self.extcap_capture_filter.as_deref();
        filter.unwrap_or_default().trim()
    }

    /// The beginning of a command that writes to the FIFO.
    fn words(&self, command: &str) -> Vec<OsString> {
        let mut words: Vec<OsString> = [command, "--format", "pcapng", "--write"]
            .map(OsString::from)
            .to_vec();
        words.push(self.fifo.clone().unwrap_or_default().into());
        words
    }
}

/// Another command of ours, from its command line.
fn translated<T: Args>(words: Vec<OsString>) -> Result<T, Failure> {
    #[derive(Parser)]
    struct Command<T: Args> {
        #[command(flatten)]
        command: T,
    }
    match Command::try_parse_from(words) {
        Ok(Command { command }) => Ok(command),
        Err(error) => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            Err(Failure::new(line.trim_start_matches("error: ")))
        }
    }
}

/// The daemon's or agent's devices. Wireshark's window stands still meanwhile, so nobody is waited for long.
fn devices(socket: &Path) -> Result<Vec<Device>, Error> {
    Client::connect_to_within(socket, PATIENCE)?.devices()
}

/// Every device that can be named in Wireshark's lines. Without a daemon there is none, which is no
/// error: Wireshark asks at each start. One that is there and does not answer, or refuses, is told of.
fn list(socket: &Path) -> Outcome {
    let devices = devices(socket).unwrap_or_else(|error| {
        let is_away = matches!(&error, Error::Unreachable { errno, .. } if *errno != Errno::AGAIN);
        let level = match is_away {
            true => log::Level::Info,
            false => log::Level::Warn,
        };
        log::log!(level, "no devices: {error}");
        Vec::new()
    });
    out::raw(&interfaces(&devices))?;
    Ok(OK)
}

fn interfaces(devices: &[Device]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut lines = format!("extcap {{version={version}}}{{display=vNPlug}}\n");
    lines += &format!("interface {{value={RECORDING}}}{{display=vNPlug: a recording}}\n");
    for device in devices.iter().filter(|device| is_plain(&device.name)) {
        let more = match plain(&device.description) {
            text if text.is_empty() => String::new(),
            text => format!(" ({text})"),
        };
        let name = &device.name;
        lines += &format!("interface {{value={PREFIX}{name}}}{{display=vNPlug {name}{more}}}\n");
    }
    lines
}

fn dlts(device: &str, socket: &Path) -> Outcome {
    let devices = devices(socket)?;
    let found = devices.iter().find(|one| one.name == device);
    let found = found.ok_or_else(|| Failure::about(device, "no such device; see `vnplug list`"))?;
    let number = found.link_type;
    let (name, display) = match number {
        1 => ("EN10MB".to_owned(), "Ethernet".to_owned()),
        other => (format!("DLT{other}"), format!("link type {other}")),
    };
    out::raw(&format!(
        "dlt {{number={number}}}{{name={name}}}{{display={display}}}\n"
    ))?;
    Ok(OK)
}

fn config(socket: &Path) -> String {
    let socket = plain(&socket.display().to_string());
    format!(
        "\
arg {{number=0}}{{call=--snaplen}}{{display=Bytes of each packet}}{{tooltip=0 is all}}{{type=unsigned}}{{default=0}}
arg {{number=1}}{{call=--sample}}{{display=One packet in}}{{tooltip=Of those that pass the filter}}{{type=unsigned}}{{range=1,1000000}}{{default=1}}
arg {{number=2}}{{call=--direction}}{{display=Direction}}{{tooltip=As the interface of the host sees it}}{{type=selector}}{{default=both}}
value {{arg=2}}{{value=both}}{{display=Both}}{{default=true}}
value {{arg=2}}{{value=rx}}{{display=Received}}{{default=false}}
value {{arg=2}}{{value=tx}}{{display=Sent}}{{default=false}}
arg {{number=3}}{{call=--socket}}{{display=Socket}}{{tooltip=Of the daemon or the agent}}{{type=string}}{{default={socket}}}
"
    )
}

/// Says on standard output what is wrong with a filter, or with who would judge it, and nothing if it is good.
fn check(device: &str, filter: &str, socket: &Path) -> Outcome {
    if let Err(error) = devices(socket) {
        out::line(&text::escape(&error.to_string()))?;
        return Ok(OK);
    }
    let options = PortOptions::new(device).socket(socket).enabled(false);
    if let Err(error) = options.filter(filter).ring_bytes(4096).open() {
        out::line(&text::escape(&error.to_string()))?;
    }
    Ok(OK)
}

/// Whether a name can stand between Wireshark's braces.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains(['{', '}']) && text::escape(name) == name
}

fn plain(text: &str) -> String {
    text::escape(text).replace(['{', '}'], "_")
}

/// How long a daemon may take that lives.
const PATIENCE: Duration = Duration::from_secs(2);
/// Before the names of devices, so that they are no interfaces of the host.
const PREFIX: &str = "vnplug-";
/// The interface that stands for recordings; no device is called so, for theirs have a hyphen.
const RECORDING: &str = "vnplug_recording";
const ETHERNET: &str = "dlt {number=1}{name=EN10MB}{display=Ethernet}\n";
const RECORDING_CONFIG: &str = "\
arg {number=0}{call=--recording}{display=Directory}{tooltip=Several, with colons between them, if it lies on several disks}{type=string}{required=true}
arg {number=1}{call=--from}{display=From}{tooltip=2026-11-21T13:00, seconds since 1970, or -10m}{type=string}
arg {number=2}{call=--to}{display=To}{tooltip=As From; now if it is empty}{type=string}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_in_wiresharks_directory_needs_no_subcommand() {
        let words = |list: &[&str]| list.iter().map(OsString::from).collect::<Vec<_>>();
        let made = |list: &[&str]| arguments(words(list).into_iter());
        assert_eq!(
            made(&["/x/extcap/vnplug-extcap", "--extcap-interfaces"]),
            words(&["/x/extcap/vnplug-extcap", "extcap", "--extcap-interfaces"])
        );
        assert_eq!(made(&["vnplug", "list"]), words(&["vnplug", "list"]));
        assert!(made(&[]).is_empty());
    }

    #[test]
    fn names_that_would_break_a_line_are_left_out() {
        let device = |name: &str, description: &str| Device {
            name: name.into(),
            description: description.into(),
            ..Device::default()
        };
        let devices = [
            device("host:eth1", "up {link}"),
            device("a}b", ""),
            device("a\nb", ""),
            device("lab", ""),
        ];
        let text = interfaces(&devices);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(
            lines[2],
            "interface {value=vnplug-host:eth1}{display=vNPlug host:eth1 (up _link_)}"
        );
        assert_eq!(lines[3], "interface {value=vnplug-lab}{display=vNPlug lab}");
    }
}
