//! How QEMU is spoken to: its machine protocol (QMP), over a socket of our own or through libvirt.
//!
//! Commands and QEMU's answers are the same in both. Events are not: libvirt keeps them, so whoever
//! waits for something is told to look instead.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::access::Owner;

/// A QEMU that takes commands.
pub(crate) trait Monitor {
    /// Runs one command and returns what it returns.
    ///
    /// # Errors
    /// [`MonitorError::Refused`] with QEMU's words. After any other error the command may or may
    /// not have had its effect.
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, MonitorError>;

    /// Hands QEMU a descriptor: the number of its set there, and its own number in QEMU.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    fn add_fd(&mut self, fd: BorrowedFd<'_>) -> Result<(i64, i64), MonitorError>;

    /// Waits until there may be something new, at most until `deadline`.
    ///
    /// # Errors
    /// The monitor is gone.
    fn news(&mut self, deadline: Instant) -> Result<News, MonitorError>;

    /// The user that QEMU runs as, or `None` if the kernel does not tell.
    ///
    /// # Errors
    /// It cannot be found this way and must be named.
    fn qemu_user(&mut self) -> Result<Option<Owner>, MonitorError>;
}

/// What [`Monitor::news`] brings.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum News {
    /// QEMU said this.
    Event(Event),
    /// This monitor brings no events; some time has passed, ask QEMU what has changed.
    Look,
    /// The deadline.
    Nothing,
}

/// Something QEMU said unasked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Event {
    /// `DEVICE_DELETED`, …
    pub(crate) name: String,
    /// What it is about.
    pub(crate) data: Value,
}

/// The monitor cannot be used, or refused a command.
#[derive(Debug)]
pub(crate) enum MonitorError {
    /// The socket cannot be connected to.
    Connect(PathBuf, io::Error),
    /// Connected, and no greeting within the limit: somebody else holds the monitor.
    NoGreeting(PathBuf, Duration),
    /// Whatever listens there is not a QMP monitor.
    NotQmp(PathBuf),
    /// `virsh` cannot be started.
    NoVirsh(io::Error),
    /// `virsh` or libvirt refused; the words are theirs.
    Libvirt(String),
    /// `virsh` printed something that is not QEMU's answer.
    NotAnswer(String),
    /// The user of this domain's QEMU is not known.
    UnknownUser(String),
    /// QEMU refused the command.
    Refused {
        /// The command.
        command: String,
        /// `GenericError`, `DeviceNotFound`, …
        class: String,
        /// QEMU's words.
        text: String,
    },
    /// No answer within the limit.
    Silent(String, Duration),
    /// QEMU ended or closed the monitor during a command.
    Closed(String),
}

impl Event {
    /// The event in a line from QEMU, if it is one.
    pub(crate) fn from_json(value: &Value) -> Option<Self> {
        Some(Self {
            name: value.get("event")?.as_str()?.to_owned(),
            data: value["data"].clone(),
        })
    }
}

impl MonitorError {
    /// The refusal in QEMU's answer to `command`, if it is one.
    pub(crate) fn in_answer(command: &str, answer: &Value) -> Option<Self> {
        let error = answer.get("error")?;
        let word = |key| error[key].as_str().unwrap_or_default().to_owned();
        Some(Self::Refused {
            command: command.to_owned(),
            class: word("class"),
            text: word("desc"),
        })
    }

    /// True if QEMU refused because there is no such device.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { class, text, .. }
            if class == "DeviceNotFound" || text.ends_with("not found"))
    }

    /// True if QEMU is unplugging the device already.
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self, Self::Refused { text, .. } if text.contains("in the process of unplug"))
    }
}

impl std::fmt::Display for MonitorError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connect(path, error) => {
                write!(f, "{}: {error}", path.display())?;
                f.write_str(match error.kind() {
                    io::ErrorKind::NotFound => {
                        "; start QEMU with -qmp unix:PATH,server=on,wait=off and give that PATH"
                    }
                    io::ErrorKind::ConnectionRefused => {
                        "; the socket file is left over, no QEMU listens there any more"
                    }
                    io::ErrorKind::PermissionDenied => {
                        "; run this as root or as the user that QEMU runs as"
                    }
                    io::ErrorKind::TimedOut => "; others hold this monitor or wait for it",
                    _ => "",
                })
            }
            Self::NoGreeting(path, limit) => write!(
                f,
                "{}: no greeting within {} s, another client holds this monitor; start QEMU with a \
                 second -qmp socket for vnplug (if libvirt holds it, give --libvirt DOMAIN instead)",
                path.display(),
                limit.as_secs_f32()
            ),
            Self::NotQmp(path) => write!(
                f,
                "{}: this is not a QMP monitor (a human monitor, -monitor, cannot be used)",
                path.display()
            ),
            Self::NoVirsh(error) if error.kind() == io::ErrorKind::NotFound => f.write_str(
                "--libvirt needs the command virsh, which is not in the PATH; install \
                 libvirt-clients, or give QEMU a monitor socket of its own and use --qmp",
            ),
            Self::NoVirsh(error) => write!(f, "virsh cannot be run: {error}"),
            Self::Libvirt(text) => write!(f, "virsh: {text}{}", libvirt_advice(text)),
            Self::NotAnswer(command) => {
                write!(f, "virsh did not print QEMU's answer to {command}")
            }
            Self::UnknownUser(domain) => write!(
                f,
                "the user that the QEMU of domain {domain} runs as could not be found; give \
                 --qemu-user, for example --qemu-user libvirt-qemu"
            ),
            Self::Refused { command, text, .. } => write!(f, "QEMU refused {command}: {text}"),
            Self::Silent(command, limit) => write!(
                f,
                "QEMU did not answer {command} within {} s; it may be stopped or overloaded",
                limit.as_secs_f32()
            ),
            Self::Closed(during) => {
                write!(
                    f,
                    "QEMU closed the monitor (during {during}); it may have ended"
                )
            }
        }
    }
}

impl std::error::Error for MonitorError {}

/// True if this QEMU runs its guest by KVM; false if it does not say so.
pub(super) fn has_kvm(monitor: &mut dyn Monitor) -> bool {
    monitor
        .execute("query-kvm", json!({}))
        .is_ok_and(|answer| answer["enabled"] == true)
}

/// What to do about libvirt's words, which are English because `virsh` runs with LC_ALL=C.
fn libvirt_advice(text: &str) -> &'static str {
    let has = |part| text.contains(part);
    if has("failed to connect to the hypervisor") {
        "; is libvirt's daemon running, and is --connect right?"
    } else if has("failed to get domain") {
        "; `virsh list` shows the running ones (--connect qemu:///system: those of root's libvirt)"
    } else if has("domain is not running") {
        "; start it first"
    } else {
        ""
    }
}
