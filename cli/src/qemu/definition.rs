//! A VM's devices in the definition of its libvirt domain (`--permanent`): the domain has them at each start, and
//! libvirt knows them, so it does not call the domain tainted.
//!
//! ```xml
//! <shmem name='FILE IN /dev/shm'>…                      the pool: ivshmem-plain
//! <channel type='unix'><source mode='connect'…          the control channel; QEMU connects again by itself
//! ```
//!
//! libvirt is spoken to by `virsh`. A running domain gets both now, too.

use std::path::Path;
use std::time::{Duration, Instant};

use vnplug::Client;
use vnplug_ring::control::{VIRTIO_PORT_NAME, VmReady, VmSpec};

use super::access::{self, Owner};
use super::attach::Attach;
use super::detach::Detach;
use super::monitor::MonitorError;
use super::virsh::Virsh;
use super::{MonitorArgs, VIRSH_LIMIT};
use crate::failure::{Failure, OK, Outcome, PENDING};
use crate::{attach, out};

/// A domain, whether it runs or not.
struct Domain {
    virsh: Virsh,
    is_running: bool,
}

/// Where a device is to be, or is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In the definition.
    Config,
    /// In the domain that runs.
    Live,
}

impl Domain {
    fn open(args: &MonitorArgs) -> Result<Self, MonitorError> {
        // clap insists on it.
        let name = args.libvirt.as_deref().unwrap_or_default();
        let virsh = Virsh::at(name, args.connect.as_deref(), VIRSH_LIMIT);
        let state = virsh.ask("domstate", &[], None)?;
        let is_running = !["shut off", "crashed"].contains(&state.as_str());
        Ok(Self { virsh, is_running })
    }

    /// A number that is this domain's, whichever QEMU it runs in.
    fn owner(&self) -> Result<u64, MonitorError> {
        // NB: `virsh domuuid` finds no domain by its UUID.
        let told = self.virsh.ask("dominfo", &[], None)?;
        let mut lines = told.lines();
        let uuid = lines.find_map(|line| line.strip_prefix("UUID:"));
        let digits = uuid.unwrap_or_default().chars();
        let digits: String = digits.filter(char::is_ascii_hexdigit).collect();
        let number = digits
            .get(..16)
            .and_then(|it| u64::from_str_radix(it, 16).ok());
        Ok(number
            .ok_or_else(|| MonitorError::NotAnswer("dominfo".to_owned()))?
            .max(1))
    }

    fn places(&self) -> &'static [Place] {
        match self.is_running {
            true => &[Place::Config, Place::Live],
            false => &[Place::Config],
        }
    }

    /// The devices of the VM `name` that are there.
    fn own(&self, name: &str, place: Place) -> Result<Vec<String>, MonitorError> {
        let inactive: &[&str] = match place {
            Place::Config => &["--inactive"],
            Place::Live => &[],
        };
        Ok(own(&self.virsh.ask("dumpxml", inactive, None)?, name))
    }

    fn put(&self, element: &str, places: &[Place]) -> Result<(), MonitorError> {
        self.change("attach-device", element, places)
    }

    fn take(&self, element: &str, place: Place) -> Result<(), MonitorError> {
        self.change("detach-device", element, &[place])
    }

    fn change(&self, what: &str, element: &str, places: &[Place]) -> Result<(), MonitorError> {
        let mut words = vec!["--file=/dev/stdin"];
        words.extend(places.iter().map(|place| match place {
            Place::Config => "--config",
            Place::Live => "--live",
        }));
        self.virsh.ask(what, &words, Some(element)).map(drop)
    }

    /// Takes the devices of the VM `name` out of the definition and of the running domain; those that the guest has not
    /// let go of within `limit`.
    fn take_all(&self, name: &str, limit: Duration) -> Result<Vec<String>, MonitorError> {
        for place in self.places() {
            for element in self.own(name, *place)? {
                self.take(&element, *place)?;
            }
        }
        if !self.is_running {
            return Ok(Vec::new());
        }
        let until = Instant::now() + limit;
        loop {
            let left = self.own(name, Place::Live)?;
            if left.is_empty() || Instant::now() >= until {
                return Ok(left);
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Attach {
    /// Writes the devices into the definition; a domain that runs gets them now.
    pub(super) fn define(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let name = &self.vm.name;
        let domain = Domain::open(&self.monitor)?;
        let user = match self.qemu_user {
            Some(user) => user,
            None => usual_user().ok_or_else(|| {
                Failure::about(
                    name,
                    format!("there is no user {USUAL_USER}: give --qemu-user"),
                )
            })?,
        };
        let mut client = connect()?;
        let owner = domain.owner()?;
        let daemon = client.server_user()?;
        let ready = client.attach_vm(VmSpec {
            // The daemon has it ready again after a boot of the host, before the domain starts.
            stays_for: Some(user.uid),
            ..self.spec(owner)
        })?;
        let done = self.write(&domain, (&ready, daemon), user);
        if done.is_err()
            && domain
                .own(name, Place::Config)
                .is_ok_and(|own| own.is_empty())
        {
            client.detach_own_vm(name, owner).unwrap_or_else(|error| {
                out::warn(&format!("{name}: the daemon did not forget it: {error}"));
            });
        }
        let is_new = done?;
        let what = match (is_new, domain.is_running) {
            (false, _) => "is in the domain's definition already, nothing to do",
            (true, true) => "is in the domain's definition, and attached",
            (true, false) => "is in the domain's definition, and attached when it starts",
        };
        out::line(&format!("{name}: {what} ({})", ready.pool_path)).map(|()| OK)
    }

    /// False if all is there.
    fn write(
        &self,
        domain: &Domain,
        (ready, daemon): (&VmReady, u32),
        user: Owner,
    ) -> Result<bool, Failure> {
        let name = &self.vm.name;
        let wanted = elements(ready).map_err(|why| Failure::about(name, why))?;
        access::hand_over(ready, daemon, user)?;
        let (mut is_there, mut old) = (true, Vec::new());
        for place in domain.places() {
            let own = domain.own(name, *place)?;
            is_there &= own.len() == wanted.len() && own.iter().any(|it| is_of(it, ready));
            old.extend(own.iter().filter_map(|it| old_file(it, ready)));
        }
        if is_there {
            return Ok(false);
        }
        // Those of a pool that is no more.
        let left = domain.take_all(name, LIMIT)?;
        if !left.is_empty() {
            return Err(Failure::about(name, NOT_LET_GO));
        }
        for file in old {
            // One that libvirt made, when the domain started and the daemon's was gone.
            let _ = std::fs::remove_file(Path::new(SHM).join(file));
        }
        for element in &wanted {
            if let Err(error) = domain.put(element, domain.places()) {
                let back = domain.take_all(name, LIMIT);
                let back = match back {
                    Ok(left) if left.is_empty() => "nothing was changed".to_owned(),
                    Ok(_) => NOT_LET_GO.to_owned(),
                    Err(error) => format!("taking back what was done failed too: {error}"),
                };
                return Err(Failure::about(name, format!("{error}; {back}")));
            }
        }
        Ok(true)
    }
}

impl Detach {
    /// Takes the devices out of the definition, and out of a domain that runs.
    pub(super) fn undefine(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let name = &self.name;
        let domain = Domain::open(&self.monitor)?;
        // As in `run`: first the ports, then the memory.
        let known = attach::forget(&mut connect()?, name, 0)?;
        let mut were = 0;
        for place in domain.places() {
            were += domain.own(name, *place)?.len();
        }
        if were == 0 && !known {
            return Err(Failure::about(
                name,
                "is not in the definition of this domain",
            ));
        }
        if !domain.take_all(name, self.timeout)?.is_empty() {
            return Err(Failure::with_code(PENDING, format!("{name}: {NOT_LET_GO}")));
        }
        out::line(&format!("{name}: detached")).map(|()| OK)
    }
}

/// Both devices, as libvirt reads them.
fn elements(ready: &VmReady) -> Result<[String; 2], String> {
    let path = Path::new(&ready.pool_path);
    let file = path.file_name().and_then(|file| file.to_str());
    let Some(file) = file.filter(|_| path.parent() == Some(Path::new(SHM))) else {
        return Err(format!(
            "libvirt takes shared memory from {SHM} alone, and the pool is {}: start the daemon without --pool-dir",
            ready.pool_path
        ));
    };
    let (file, bytes) = (escaped(file), ready.pool_len);
    let shmem = format!(
        "<shmem name='{file}'><model type='ivshmem-plain'/><size unit='b'>{bytes}</size></shmem>"
    );
    let path = escaped(&ready.control_path);
    // NB: libvirt would make QEMU's user the owner of the socket, which is then no more ours for the next daemon; and
    // not start the domain while there is none.
    let channel = format!(
        "<channel type='unix'><source mode='connect' path='{path}'><reconnect enabled='yes' timeout='1'/>\
         <seclabel model='dac' relabel='no'/></source><target type='virtio' name='{VIRTIO_PORT_NAME}'/></channel>"
    );
    Ok([shmem, channel])
}

/// Whether this element of a domain is the pool of this VM as it is now.
fn is_of(element: &str, ready: &VmReady) -> bool {
    let file = ready.pool_path.rsplit('/').next();
    file_of(element) == file
}

/// The file of a pool that this VM had before, by the same daemon.
fn old_file(element: &str, ready: &VmReady) -> Option<String> {
    let (file, now) = (file_of(element)?, ready.pool_path.rsplit('/').next()?);
    // The last word is `pool`, the one before it a number.
    let stem = |it: &str| Some(it.rsplitn(3, '.').nth(2)?.to_owned());
    (file != now && !file.contains('/') && stem(file)? == stem(now)?).then(|| file.to_owned())
}

/// The file that an element names, if it is a pool.
fn file_of(element: &str) -> Option<&str> {
    element.strip_prefix("<shmem name='")?.split('\'').next()
}

/// The devices of the VM `name` in a domain's XML, as libvirt writes it.
pub(super) fn own(xml: &str, name: &str) -> Vec<String> {
    let of = |tag: &str| -> Vec<String> {
        let (begin, end) = (format!("<{tag} "), format!("</{tag}>"));
        let rest = xml.split(&begin).skip(1);
        let element = |it: &str| Some(format!("{begin}{}{end}", it.split_once(&end)?.0));
        rest.filter_map(element).collect()
    };
    let shmem = |it: &String| {
        let file = file_of(it).unwrap_or_default();
        // vnplug-INSTANCE-NAME.NUMBER.pool
        let rest = file
            .strip_prefix("vnplug-")
            .and_then(|it| it.split_once('-'));
        let rest = rest.and_then(|(_, it)| it.strip_prefix(name)?.strip_prefix('.'));
        rest.is_some_and(|it| it.ends_with("pool") && it.matches('.').count() <= 1)
    };
    let channel = |it: &String| {
        it.contains(&format!("/{name}.control'")) && it.contains(&format!("'{VIRTIO_PORT_NAME}'"))
    };
    let pools = of("shmem").into_iter().filter(shmem);
    pools
        .chain(of("channel").into_iter().filter(channel))
        .collect()
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('\'', "&apos;")
}

/// The user of QEMUs of the system's libvirt.
fn usual_user() -> Option<Owner> {
    access::parse_owner(USUAL_USER).ok()
}

const USUAL_USER: &str = "libvirt-qemu";
/// Where libvirt has shared memory.
const SHM: &str = "/dev/shm";
const NOT_LET_GO: &str = "the guest has not let go of the devices (its system must run and support PCI hot-plug); \
     run `vnplug detach qemu --permanent` again later, or stop the domain";
/// How long a guest may take that has devices of a pool that is no more.
const LIMIT: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(pool: &str) -> VmReady {
        VmReady {
            pool_path: pool.into(),
            pool_len: 1 << 20,
            control_path: "/run/a'b/vms/probe.control".into(),
            doorbell_path: String::new(),
            arenas: Vec::new(),
        }
    }

    #[test]
    fn what_is_written_is_found_again_and_nobody_elses() {
        let pool = "vnplug-bab1b030-probe.49d4e7d21981b9c7.pool";
        let ready = ready(&format!("/dev/shm/{pool}"));
        let [shmem, channel] = elements(&ready).unwrap();
        assert!(
            channel.contains("path='/run/a&apos;b/vms/probe.control'"),
            "{channel}"
        );
        let others = "<channel type='unix'><source mode='connect' path='/x/a-probe.control'/>\
             <target type='virtio' name='org.vnplug.control'/></channel>\
             <channel type='unix'><source path='/x/probe.control'/><target name='org.qemu'/></channel>\
             <shmem name='vnplug-bab1b030-a-probe.49d4e7d21981b9c7.pool'><size/></shmem>\
             <shmem name='other'><size/></shmem>";
        let xml = format!("<devices>{others}{channel}\n{shmem}</devices>");
        assert_eq!(own(&xml, "probe"), [shmem.clone(), channel]);
        assert_eq!(own(others, "probe"), [""; 0]);
        assert!(is_of(&shmem, &ready));
        assert_eq!(old_file(&shmem, &ready), None);
        let later = VmReady {
            pool_path: "/dev/shm/vnplug-bab1b030-probe.0123456789abcdef.pool".into(),
            ..ready.clone()
        };
        assert_eq!(old_file(&shmem, &later).as_deref(), Some(pool));
        let other = VmReady {
            pool_path: "/dev/shm/vnplug-1-probe.pool".into(),
            ..ready
        };
        assert!(!is_of(&shmem, &other));
        assert_eq!(old_file(&shmem, &other), None);
        // A pool of before files had numbers.
        let old = elements(&other).unwrap();
        assert_eq!(own(&old.concat(), "probe").len(), 2);
    }

    #[test]
    fn a_pool_that_libvirt_cannot_take_is_refused() {
        let error = elements(&ready("/run/pools/vnplug-1-probe.pool")).unwrap_err();
        assert!(error.contains("/dev/shm alone"), "{error}");
    }
}
