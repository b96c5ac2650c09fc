//! A switch as the operator writes it. `mode`, `dirmode`, `group`, `mgmt` and `mgmtmode` are the options of
//! `vde_switch`.
//!
//! Its settings and its entrances can become others while it runs; for the other options it must be made anew.

use std::collections::BTreeSet;
use std::path::PathBuf;

use vnplug_os::privileges;
use vnplug_path::source::SourceError;
use vnplug_switch::forward::MAX_PORTS;
use vnplug_switch::settings::Settings;
use vnplug_switch::{
    Access, SocketsConfig, Switch, SwitchConfig, Switchboard, Twin, Uplink, VdeConfig, VhostConfig,
};

use super::{Means, Opened, Options, SWITCH, SourceSpec, uplink};

impl SourceSpec {
    /// Whether it is a switch.
    pub(crate) fn is_switch(&self) -> bool {
        self.kind == SWITCH
    }

    /// The same switch with other options where these texts say so: `key=value`, or `key=no` for none.
    pub(crate) fn with(&self, texts: &[String]) -> Self {
        let mut new = self.clone();
        for text in texts {
            match text.split_once('=') {
                Some((key, "" | "no" | "none")) => drop(new.options.remove(key)),
                Some((key, value)) => drop(new.options.insert(key.into(), value.into())),
                None => {}
            }
        }
        new
    }

    /// The uplinks of a switch, as they are written.
    pub(crate) fn uplink_texts(&self) -> Vec<String> {
        let all = self.options.get("uplink");
        all.iter()
            .flat_map(|all| all.split('+'))
            .map(str::to_owned)
            .collect()
    }

    /// Uplinks of a switch that runs, which are written so, not opened yet; and whether that takes more rights than most
    /// threads have.
    ///
    /// # Errors
    /// [`SourceError`]: what is wrong, or impossible by now.
    pub(crate) fn late_uplinks(
        &self,
        texts: &[String],
        means: &Means,
    ) -> Result<(Vec<Uplink>, bool), SourceError> {
        let options = Options {
            name: &self.name,
            left: self.options.clone(),
            waits: false,
            checks: false,
        };
        let one = |text: &String| {
            let uplink = uplink::of(&options, text, &mut || Err(no_twin(text)))?;
            may_be_late(text, &uplink, means).map(|()| uplink)
        };
        let all = texts.iter().map(one).collect::<Result<Vec<_>, _>>()?;
        let needs_more = all.iter().any(|it| it.how == uplink::AF_XDP);
        Ok((all, needs_more))
    }

    /// What a running switch is to be like from now on, uplinks and threads aside.
    ///
    /// # Errors
    /// [`SourceError`] if an option is unknown or out of range.
    pub(crate) fn entrances_and_settings(
        &self,
        means: &Means,
    ) -> Result<SwitchConfig, SourceError> {
        let mut options = Options {
            name: &self.name,
            left: self.options.clone(),
            waits: false,
            checks: false,
        };
        let config = config(&mut options, means.user)?;
        FIXED.iter().for_each(|key| drop(options.take(key)));
        options.done()?;
        Ok(config)
    }

    /// The options for which a running switch that was `before` would have to be made anew.
    pub(crate) fn not_while_it_runs(&self, before: &Self) -> Vec<String> {
        let keys: BTreeSet<_> = self.options.keys().chain(before.options.keys()).collect();
        let differs = |key: &&String| self.options.get(*key) != before.options.get(*key);
        let waits = |key: &&String| !is_setting(key) && !is_entrance(key);
        keys.into_iter()
            .filter(differs)
            .filter(waits)
            .cloned()
            .collect()
    }
}

/// Whether an option of a switch holds as long as there is the switch.
pub(crate) fn is_for_life(key: &str) -> bool {
    FOR_LIFE.contains(&key)
}

/// Whether an option says where clients join, and who may, or which interfaces of the host are ports.
pub(crate) fn is_entrance(key: &str) -> bool {
    ENTRANCES.contains(&key)
}

fn is_setting(key: &str) -> bool {
    let of_port = ["default.", "port."];
    SETTINGS.contains(&key) || of_port.iter().any(|it| key.starts_with(it))
}

/// Opens a switch, of a daemon that will be this user (uid, gid).
pub(super) fn open(
    options: &mut Options<'_>,
    board: &mut Option<Switchboard>,
    locks_memory: &mut bool,
    means: &Means,
) -> Result<Opened, SourceError> {
    let user = means.user;
    let config = config(options, user)?;
    let (mut uplinks, mut twin) = (Vec::new(), None);
    for text in options.list("uplink", |text| Some(text.to_owned()))? {
        let uplink = uplink::of(options, &text, &mut || {
            if means.is_late {
                return Err(no_twin(&text));
            }
            if twin.is_none() {
                twin = Some(Twin::open(&config, user)?);
            }
            Ok(twin.iter().flatten().next().map(Twin::gate))
        })?;
        may_be_late(&text, &uplink, means)?;
        *locks_memory |= uplink.how == uplink::AF_XDP;
        uplinks.push(uplink);
    }
    options.done()?;
    let hub = if config.settings.is_hub {
        "hub"
    } else {
        "switch"
    };
    let description = hub.to_owned();
    if twin.is_none() {
        Twin::forget(&config.name, user);
    }
    // Its sockets are opened here, as those of a source are.
    let needs_more = means.is_late && uplinks.iter().any(|it| it.how == uplink::AF_XDP);
    let open = move || Switch::open_with(config, uplinks, twin.flatten());
    let opened = match needs_more {
        true => means.errands.run(open)?,
        false => open(),
    };
    let (queue, opened) = opened?;
    *board = Some(opened);
    Ok((SWITCH, description, vec![queue], false))
}

fn no_twin(text: &str) -> SourceError {
    SourceError::new(format!("{text}: a twin {TOO_LATE}"))
}

/// Refuses an uplink that takes rights that nobody has any more.
fn may_be_late(text: &str, uplink: &Uplink, means: &Means) -> Result<(), SourceError> {
    if means.is_late && uplink.how == uplink::AF_XDP && !means.errands.are_done() {
        return Err(SourceError::new(format!(
            "{text}: an uplink by AF_XDP {TOO_LATE}; or run it with change_programs = \"on\""
        )));
    }
    Ok(())
}

/// All but the uplinks.
fn config(
    options: &mut Options<'_>,
    user: Option<(u32, u32)>,
) -> Result<SwitchConfig, SourceError> {
    let mut config = SwitchConfig::new(options.name);
    options.set("ports", &mut config.ports.0)?;
    options.set("ports_each", &mut config.ports.1)?;
    if config.ports.0 > MAX_PORTS {
        let ports = config.ports.0.to_string();
        let want = format!("a number of ports up to {MAX_PORTS}");
        return Err(options.bad("ports", &ports, want));
    }
    options.set("stations", &mut config.stations.0)?;
    options.set("stations_each", &mut config.stations.1)?;
    if config.stations.0 > MAX_STATIONS {
        let stations = config.stations.0.to_string();
        let want = format!("a number of addresses up to {MAX_STATIONS}");
        return Err(options.bad("stations", &stations, want));
    }
    let mut longest = config.longest as u32;
    options.size("longest", &mut longest)?;
    config.longest = longest as usize;
    if !LONGEST.contains(&config.longest) {
        let want = format!(
            "a number of bytes from {} to {}",
            LONGEST.start(),
            LONGEST.end()
        );
        return Err(options.bad("longest", &longest.to_string(), want));
    }
    options.set("lanes", &mut config.lanes)?;
    if config.lanes > MAX_LANES {
        let lanes = config.lanes.to_string();
        let want = format!("a number of threads up to {MAX_LANES}");
        return Err(options.bad("lanes", &lanes, want));
    }
    entrances(options, user, &mut config)?;
    settings(options, &mut config.settings)?;
    Ok(config)
}

/// What can be said at run time, too.
fn settings(options: &mut Options<'_>, settings: &mut Settings) -> Result<(), SourceError> {
    let keys: Vec<String> = options
        .left
        .keys()
        .filter(|key| is_setting(key))
        .cloned()
        .collect();
    for key in keys {
        let value = options.take(&key).unwrap_or_default();
        settings.set(&key, &value).map_err(|error| {
            SourceError::new(format!("switch {:?}: {key}: {error}", options.name))
        })?;
    }
    settings.settle();
    Ok(())
}

/// Where others come in, and who may.
fn entrances(
    options: &mut Options<'_>,
    user: Option<(u32, u32)>,
    config: &mut SwitchConfig,
) -> Result<(), SourceError> {
    let mut path = |key| options.take(key).map(PathBuf::from);
    let [vde, stream, bess, dgram] = ["vde", "stream", "bess", "dgram"].map(&mut path);
    let vhost = path("vhost");
    let connect = options.take("vhostconnect").unwrap_or_default();
    let mode = options.mode("mode")?;
    let dir_mode = options.mode("dirmode")?;
    let group_name = options.take("group");
    let mgmt = options.take("mgmt");
    let mgmt_mode = options.mode("mgmtmode")?;
    let wrong = |what: &str| SourceError::new(format!("switch {:?}: {what}", options.name));
    if vde.is_none() && (mgmt.is_some() || mgmt_mode.is_some()) {
        return Err(wrong(
            "mgmt and mgmtmode are for VDE: say where, with vde=DIR",
        ));
    }
    let shared = mode.is_some() || dir_mode.is_some() || group_name.is_some();
    let all = [&vde, &vhost, &stream, &bess, &dgram];
    let none = all.iter().all(|it| it.is_none());
    if none && shared {
        return Err(wrong(
            "mode, dirmode and group are for entrances: say which, with vde=DIR, vhost=PATH, stream=PATH, \
             bess=PATH or dgram=DIR",
        ));
    }
    let group = group_name.map(|name| privileges::group(&name));
    let no_group = |error| SourceError::io(format!("switch {:?}", options.name), error);
    let group = group.transpose().map_err(no_group)?;
    let mode = mode.unwrap_or(0o600);
    config.vde = vde.map(|dir| VdeConfig {
        dir,
        mode,
        dir_mode,
        group,
        mgmt: mgmt.map(|path| (PathBuf::from(path), mgmt_mode.unwrap_or(0o600))),
        user,
    });
    let access = Access {
        mode,
        dir_mode,
        group,
        user,
    };
    config.vhost = VhostConfig {
        path: vhost,
        connect: connect
            .split(':')
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
            .collect(),
        access: access.clone(),
    };
    config.sockets = SocketsConfig {
        stream,
        bess,
        dgram,
        access,
    };
    Ok(())
}

/// What a switch is made with, once and for all.
const FOR_LIFE: [&str; 9] = [
    "ports",
    "ports_each",
    "stations",
    "stations_each",
    "longest",
    "lanes",
    "threads",
    "cpus",
    "busy",
];
/// Where clients join, and who may; and uplinks.
const ENTRANCES: [&str; 12] = [
    "uplink",
    "vde",
    "stream",
    "bess",
    "dgram",
    "vhost",
    "vhostconnect",
    "mode",
    "dirmode",
    "group",
    "mgmt",
    "mgmtmode",
];
/// What else there is to say of it.
const FIXED: [&str; 5] = ["uplink", "threads", "cpus", "busy", "start"];
/// Why something needs a new start.
const TOO_LATE: &str = "takes rights that the daemon gives up after its start: put the switch into the configuration, and \
                        start the daemon again";
/// Settings of a switch, beside those of its ports.
const SETTINGS: [&str; 6] = ["hub", "age", "hold", "storm", "loops", "static"];
const MAX_STATIONS: usize = 1 << 20;
/// Threads that forward between virtual machines.
const MAX_LANES: usize = 64;
/// Bytes of the longest frame: of Ethernet's MTU, and more than a super-frame has.
const LONGEST: std::ops::RangeInclusive<usize> = 1514..=(66 << 10);
