//! Installs vNPlug's agent in a guest by QEMU's own (qemu-ga), and starts it there.

mod guest;
mod program;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use vnplug_os::event::random;

use self::guest::{Guest, Trouble};
use self::program::Program;
use super::virsh::Virsh;
use super::{MonitorArgs, VIRSH_LIMIT};
use crate::failure::{Failure, REFUSES, UNANSWERED};
use crate::{out, text};

/// Whether the agent is to be put into the guest, and how.
#[derive(Debug, Args)]
pub(super) struct Push {
    /// Have QEMU's guest agent (qemu-ga), whose SOCKET this is, install vNPlug's agent in the guest and start it. Without
    /// SOCKET by libvirt (--libvirt)
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, conflicts_with_all = ["incoming", "grow"])]
    guest_agent: Option<Option<PathBuf>>,
    /// With --guest-agent: the static program to install. Default: this vnplug
    #[arg(long, value_name = "FILE", requires = "guest_agent")]
    guest_program: Option<PathBuf>,
    /// With --guest-agent: how long to wait for QEMU's guest agent, which is there when the guest has started, and to begin
    /// again if the guest starts anew meanwhile. The VM is attached before
    #[arg(long, value_name = "TIME", default_value = "6s", overrides_with = "guest_wait", value_parser = text::duration)]
    guest_wait: Duration,
}

impl Push {
    /// What is to be installed, if that was asked for. Fails before anything is done where it cannot be.
    pub(super) fn prepare(&self, monitor: &MonitorArgs) -> Result<Option<Program>, Failure> {
        match (&self.guest_agent, &monitor.libvirt) {
            (None, _) => Ok(None),
            (Some(None), None) => Err(Failure::new(
                "--guest-agent needs the SOCKET of the guest agent's channel (without --libvirt)",
            )),
            _ => Program::read(self.guest_program.as_deref()).map(Some),
        }
    }

    /// Installs and starts it in the guest, when its agent is there. `name`: the VM.
    ///
    /// # Errors
    /// With a code of their own: nobody answered in time, the guest refuses.
    pub(super) fn run(
        &self,
        program: &Program,
        name: &str,
        monitor: &MonitorArgs,
    ) -> Result<(), Failure> {
        let until = Instant::now() + self.guest_wait;
        let (mut number, mut pause) = (0, PAUSE);
        let mut was_there = false;
        // Who begins again writes over what he has left.
        let own = random();
        loop {
            number += 1;
            let limit = guest::LIMIT;
            let done = self.guest(monitor, limit).and_then(|mut guest| {
                was_there = true;
                install(&mut guest, program, own)
            });
            let trouble = match done {
                Ok(done) => return out::line(&format!("{name}: {done}")),
                Err(trouble) => trouble,
            };
            let is_late = Instant::now() + pause >= until;
            let (code, why) = match &trouble {
                Trouble::Final(why) => (REFUSES, why.line()),
                Trouble::Passing(why) if is_late => (UNANSWERED, self.late(was_there, &why.line())),
                Trouble::Passing(why) => {
                    log::debug!("{name}: not yet: {}", why.line());
                    if number == 1 && self.guest_wait >= LONG {
                        let limit = self.guest_wait.as_secs();
                        out::note(&format!(
                            "{name}: the guest is waited for, {limit} s at most"
                        ));
                    }
                    // Between two looks others can speak to it.
                    thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    continue;
                }
            };
            let text = format!("{name}: the agent is not installed: {why}");
            return Err(Failure::with_code(code, text));
        }
    }

    /// What is said when the time is over.
    fn late(&self, was_there: bool, why: &str) -> String {
        let limit = self.guest_wait.as_secs_f32();
        match was_there {
            _ if self.guest_wait.is_zero() => format!("the guest does not answer yet ({why})"),
            true => {
                format!("the guest's agent was lost, and within {limit} s not heard again: {why}")
            }
            false => format!(
                "no guest agent answers within {limit} s: is qemu-guest-agent installed and running in the guest? ({why})"
            ),
        }
    }

    /// Whether the guest's kernel is locked down, as QEMU's guest agent reads it there; `None` where it may not be
    /// asked, does not answer, or there is nothing to read.
    pub(super) fn is_locked_down(&self, monitor: &MonitorArgs) -> Option<bool> {
        if self.guest_agent.is_none() && monitor.libvirt.is_none() {
            return None;
        }
        // Nothing depends on the answer but what is plugged first: an agent that hangs is not waited for.
        let told = self
            .guest(monitor, guest::TRY_LIMIT)
            .and_then(|mut guest| guest.read(LOCKDOWN));
        match told {
            Ok(modes) => is_locked_down(&modes),
            Err(trouble) => {
                let why = trouble.why();
                log::debug!("whether the guest is locked down is not known: {why}");
                None
            }
        }
    }

    /// The guest's agent; by libvirt, its answers may take `limit`.
    fn guest(&self, monitor: &MonitorArgs, limit: Duration) -> Result<Guest, Trouble> {
        match self.guest_agent.iter().flatten().next() {
            Some(socket) => Guest::at(socket, guest::TRY_LIMIT),
            None => {
                let domain = monitor.libvirt.as_deref().unwrap_or_default();
                let virsh = Virsh::at(domain, monitor.connect.as_deref(), VIRSH_LIMIT);
                Guest::of(virsh, limit)
            }
        }
    }
}

/// `own`: a number that no other push has.
fn install(guest: &mut Guest, program: &Program, own: u64) -> Result<String, Trouble> {
    guest.must_do(&NEEDED)?;
    let there = Found::in_guest(guest)?;
    if there.is("packaged") {
        guest.run("systemctl enable --now vnplug-agent")?;
        return Ok("the guest has the agent's package; its service runs".to_owned());
    }
    let machine = there.value("machine");
    if machine != program.machine {
        let ours = program.machine;
        return Err(Trouble::Final(Failure::new(format!(
            "the guest is {machine} and the program for {ours}: give --guest-program FILE"
        ))));
    }
    let boot = there.boot();
    guest.run(&format!("boot={boot}\n{SWEEP}"))?;
    // What an earlier boot has left nobody writes any more.
    let mark = format!("{boot}.{own:016x}");
    let began = Instant::now();
    let size = program.bytes.len();
    let version = concat!("vnplug ", env!("CARGO_PKG_VERSION"));
    let is_there = there.value("version") == version && there.value("size") == size.to_string();
    if !is_there {
        guest.run("mkdir -p /usr/local/bin")?;
        let new = format!("/usr/local/bin/.vnplug.{mark}.new");
        let place = format!("chmod 755 {new} && mv {new} {PROGRAM}");
        offer(guest, &new, &program.bytes, &place)?;
    }
    let installed = match is_there {
        true => format!("{PROGRAM} is in the guest already"),
        false => format!(
            "{PROGRAM} is in the guest ({:.1} MB in {:.1} s)",
            size as f64 / 1e6,
            began.elapsed().as_secs_f32()
        ),
    };
    let runs = start(guest, &there, is_there, &mark)?;
    Ok(format!("{installed}; {runs}"))
}

/// Writes a file under a temporary name, and has a script put it where it belongs.
fn offer(guest: &mut Guest, new: &str, bytes: &[u8], place: &str) -> Result<(), Trouble> {
    let placed = guest
        .run(&format!("umask 022 && : >{new}"))
        .and_then(|_| guest.write(new, bytes))
        .and_then(|()| guest.run(place));
    if placed.is_err() {
        // What is half there helps nobody. A guest that does not answer keeps it until the next boot.
        let _ = guest.run(&format!("rm -f {new}"));
    }
    placed.map(drop)
}

/// What the kernel writes of its lockdown: all modes, the one that is so in brackets (security/lockdown/lockdown.c).
fn is_locked_down(modes: &str) -> Option<bool> {
    modes.split(['[', ']']).nth(1).map(|mode| mode != "none")
}

/// Starts the agent, as a service if the guest has systemd. One that runs and is the same goes on, with its readers.
fn start(
    guest: &mut Guest,
    there: &Found,
    is_same: bool,
    mark: &str,
) -> Result<&'static str, Trouble> {
    let is_same = format!("is_same={}\n", u8::from(is_same));
    if there.is("systemd") {
        guest.run("mkdir -p /etc/systemd/system")?;
        let new = format!("/etc/systemd/system/.vnplug-agent.{mark}.new");
        let serve = format!("{is_same}new={new}\n{SERVE}");
        offer(guest, &new, unit().as_bytes(), &serve)?;
        return Ok("the agent runs as vnplug-agent.service");
    }
    guest.run(&(is_same + START))?;
    Ok("the agent runs, until the guest ends: it has no systemd that would start it again")
}

/// The unit for the guest. Program and unit are two files, and each host that attaches the guest writes its own, or what
/// --guest-program names: systemd would end an older program again and again that never says that it is ready.
fn unit() -> String {
    UNIT.replacen(NOTIFY, SIMPLE, 1)
}

/// What the guest says of itself.
struct Found(BTreeMap<String, String>);

impl Found {
    fn in_guest(guest: &mut Guest) -> Result<Self, Trouble> {
        let said = guest.run(LOOK)?;
        let pairs = said.lines().filter_map(|line| line.split_once('='));
        Ok(Self(
            pairs
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
        ))
    }

    fn is(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn value(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }

    /// The number of the guest's boot, as far as it goes into a name.
    fn boot(&self) -> String {
        let told = self.value("boot").chars();
        told.filter(char::is_ascii_hexdigit).take(8).collect()
    }
}

const NEEDED: [&str; 6] = [
    "guest-exec",
    "guest-exec-status",
    "guest-file-open",
    "guest-file-write",
    "guest-file-flush",
    "guest-file-close",
];
const LOCKDOWN: &str = "/sys/kernel/security/lockdown";
const PROGRAM: &str = "/usr/local/bin/vnplug";
const UNIT: &str = include_str!("../../../../dist/vnplug-agent.service");
/// Its line that has systemd wait until the agent says that it is ready, and what is written in its place.
const NOTIFY: &str = "\nType=notify\n";
const SIMPLE: &str = "\n# The program beside it may be an older one, which does not say that it is ready.\nType=simple\n";
const SERVE: &str = "cd /etc/systemd/system
if [ $is_same = 1 ] && cmp -s $new vnplug-agent.service; then
    rm $new && systemctl enable --now vnplug-agent
else
    mv $new vnplug-agent.service &&
        systemctl daemon-reload && systemctl enable vnplug-agent && systemctl restart vnplug-agent
fi";
/// Removes what pushes left in earlier boots of the guest: its clock may say anything.
const SWEEP: &str =
    "for left in /usr/local/bin/.vnplug*.new /etc/systemd/system/.vnplug-agent*.new; do
    case $left in *.$boot.*) ;; *) rm -f $left ;; esac
done";
/// Without `pgrep` and the like, which small systems lack. What the agent says is in /run/vnplug-agent.log.
const START: &str = r#"agents() {
    for process in /proc/[0-9]*; do
        [ "$(tr '\0' ' ' <$process/cmdline 2>/dev/null)" != '/usr/local/bin/vnplug agent ' ] || echo ${process#/proc/}
    done
}
[ $is_same = 0 ] || [ -z "$(agents)" ] || exit 0
for old in $(agents); do kill $old; done
setsid /usr/local/bin/vnplug agent </dev/null >/run/vnplug-agent.log 2>&1 &
sleep 1
[ -n "$(agents)" ] || { echo "the agent ended at once: $(tail -n 1 /run/vnplug-agent.log)" >&2; exit 1; }"#;
/// Lines of `key=value`.
const LOOK: &str = "echo machine=$(uname -m)
echo boot=$(cat /proc/sys/kernel/random/boot_id)
[ ! -d /run/systemd/system ] || echo systemd=yes
for unit in /lib /usr/lib; do [ ! -e $unit/systemd/system/vnplug-agent.service ] || echo packaged=yes; done
[ ! -x /usr/local/bin/vnplug ] || echo version=$(/usr/local/bin/vnplug --version)
[ ! -x /usr/local/bin/vnplug ] || echo size=$(wc -c </usr/local/bin/vnplug)";

/// Who waits longer than this is told so.
const LONG: Duration = Duration::from_secs(10);
/// Between the first two looks for the guest's agent, and between later ones.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_program_can_serve_under_the_unit_that_is_written() {
        // The control: the package's waits for what such a program does not say.
        let types = |unit: &str| -> Vec<String> {
            let lines = unit.lines().filter(|line| line.starts_with("Type="));
            lines.map(str::to_owned).collect()
        };
        assert_eq!(types(UNIT), ["Type=notify"]);
        assert_eq!(types(&unit()), ["Type=simple"]);
    }

    #[test]
    fn the_mode_in_brackets_is_the_one_that_is_so() {
        assert_eq!(
            is_locked_down("[none] integrity confidentiality\n"),
            Some(false)
        );
        for locked in [
            "none [integrity] confidentiality\n",
            "none integrity [confidentiality]\n",
        ] {
            assert_eq!(is_locked_down(locked), Some(true));
        }
        for nothing in ["", "none integrity\n"] {
            assert_eq!(is_locked_down(nothing), None);
        }
    }
}
