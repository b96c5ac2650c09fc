//! A switch as the operator writes it. `mode`, `dirmode`, `group`, `mgmt` and `mgmtmode` are the options of
//! `vde_switch`.

use std::path::PathBuf;

use vnplug_os::privileges;
use vnplug_path::source::SourceError;
use vnplug_switch::forward::MAX_PORTS;
use vnplug_switch::settings::Settings;
use vnplug_switch::{
    Access, SocketsConfig, Switch, SwitchConfig, Switchboard, Twin, Uplink, VdeConfig, VhostConfig,
};

use super::{Opened, Options, uplink};

/// Opens a switch, of a daemon that will be this user (uid, gid).
pub(super) fn open(
    options: &mut Options<'_>,
    board: &mut Option<Switchboard>,
    locks_memory: &mut bool,
    user: Option<(u32, u32)>,
) -> Result<Opened, SourceError> {
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
    entrances(options, user, &mut config)?;
    let (mut uplinks, mut twin) = (Vec::new(), None);
    for text in options.list("uplink", |text| Some(text.to_owned()))? {
        let uplink = uplink::of(options, &text, &mut || {
            if twin.is_none() {
                twin = Some(Twin::open(&config, user)?);
            }
            Ok(twin.iter().flatten().next().map(Twin::gate))
        })?;
        *locks_memory |= uplink.how == uplink::AF_XDP;
        uplinks.push(uplink);
    }
    settings(options, &mut config.settings)?;
    options.done()?;
    let hub = if config.settings.is_hub {
        "hub"
    } else {
        "switch"
    };
    let mut description = hub.to_owned();
    for (name, path) in config.entrances() {
        description += &format!(", {name} at {}", path.display());
    }
    for Uplink { interface, how, .. } in &uplinks {
        description += &format!(", uplink {interface} ({how})");
    }
    if twin.is_none() {
        Twin::forget(&config.name, user);
    }
    let (queue, opened) = Switch::open_with(config, uplinks, twin.flatten())?;
    *board = Some(opened);
    Ok((super::SWITCH, description, vec![queue], false))
}

/// What can be said at run time, too.
fn settings(options: &mut Options<'_>, settings: &mut Settings) -> Result<(), SourceError> {
    let is_setting = |key: &String| {
        let of_port = ["default.", "port."];
        SETTINGS.contains(&key.as_str()) || of_port.iter().any(|it| key.starts_with(it))
    };
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

/// Settings of a switch, beside those of its ports.
const SETTINGS: [&str; 6] = ["hub", "age", "hold", "storm", "loops", "static"];
const MAX_STATIONS: usize = 1 << 20;
/// Bytes of the longest frame: of Ethernet's MTU, and more than a super-frame has.
const LONGEST: std::ops::RangeInclusive<usize> = 1514..=(66 << 10);
