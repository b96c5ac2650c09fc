//! The file: its tables, and what they mean.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use vnplug_os::privileges;
use vnplug_ring::units;

use super::OnOff;
use crate::hub::grant::of_join;
use crate::hub::{BackendGrant, Join, Peer, TwinGrant};
use crate::spec::SourceSpec;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) socket: Option<PathBuf>,
    pub(super) socket_mode: Option<u32>,
    pub(super) socket_group: Option<String>,
    pub(super) state_dir: Option<PathBuf>,
    pub(super) pool_dir: Option<PathBuf>,
    pub(super) user: Option<String>,
    #[serde(default)]
    pub(super) observers: Vec<toml::Value>,
    pub(super) ring_bytes: Option<toml::Value>,
    pub(super) max_ring_bytes: Option<toml::Value>,
    pub(super) pool_bytes: Option<toml::Value>,
    pub(super) max_ports: Option<usize>,
    pub(super) max_ports_each: Option<usize>,
    pub(super) max_user_bytes: Option<toml::Value>,
    pub(super) wake_us: Option<u32>,
    pub(super) jit: Option<OnOff>,
    pub(super) change_programs: Option<OnOff>,
    pub(super) jit_bytes: Option<toml::Value>,
    #[serde(default)]
    pub(super) source: Vec<BTreeMap<String, toml::Value>>,
    #[serde(default)]
    pub(super) switch: Vec<BTreeMap<String, toml::Value>>,
    #[serde(default)]
    pub(super) allow: Vec<AllowTable>,
    #[serde(default)]
    pub(super) join: Vec<JoinTable>,
    #[serde(default)]
    pub(super) backend: Vec<BTreeMap<String, toml::Value>>,
    #[serde(default)]
    pub(super) program: Vec<BTreeMap<String, toml::Value>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct JoinTable {
    vm: Option<String>,
    uid: Option<u32>,
    switch: String,
    #[serde(flatten)]
    settings: BTreeMap<String, toml::Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AllowTable {
    pub(super) vm: Option<String>,
    pub(super) uid: Option<u32>,
    pub(super) source: String,
    #[serde(default)]
    pub(super) filter: String,
    #[serde(default)]
    pub(super) send: bool,
    /// On which terms.
    #[serde(default)]
    pub(super) send_terms: String,
}

pub(super) fn read(path: &Path) -> Result<File, String> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
}

pub(super) fn source(mut table: BTreeMap<String, toml::Value>) -> Result<SourceSpec, String> {
    let mut take = |key: &str| table.remove(key).map(option).transpose();
    let name = take("name")?.ok_or("a [[source]] or [[switch]] needs a name")?;
    let kind = take("kind")?.unwrap_or_else(|| "af_packet".into());
    let options = table
        .into_iter()
        .map(|(key, value)| Ok((key, option(value)?)))
        .collect::<Result<_, String>>()?;
    let spec = SourceSpec::new(&name, &kind, options).map_err(|error| error.to_string())?;
    Ok(spec.waiting())
}

/// Tables in a switch's table, as the command line has them: `port.3.vlan`.
pub(super) fn flat(table: BTreeMap<String, toml::Value>) -> BTreeMap<String, toml::Value> {
    let mut flat = BTreeMap::new();
    let mut left: Vec<_> = table.into_iter().collect();
    while let Some((key, value)) = left.pop() {
        match value {
            toml::Value::Table(inner) => {
                let inner = inner.into_iter();
                left.extend(inner.map(|(name, value)| (format!("{key}.{name}"), value)));
            }
            value => {
                flat.insert(key, value);
            }
        }
    }
    flat
}

/// A source's option as the command line has it; a list is joined by `+`.
fn option(value: toml::Value) -> Result<String, String> {
    match value {
        toml::Value::String(text) => Ok(text),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Boolean(yes) => Ok(if yes { "yes" } else { "no" }.to_owned()),
        toml::Value::Float(number) => Ok(number.to_string()),
        toml::Value::Array(items) => {
            let items: Result<Vec<_>, _> = items.into_iter().map(option).collect();
            Ok(items?.join("+"))
        }
        other => Err(format!("a source's option cannot be {other}")),
    }
}

/// A user that sees all counters, by name or number.
pub(super) fn observer(user: &toml::Value) -> Result<u32, String> {
    let found = match user {
        toml::Value::Integer(uid) => u32::try_from(*uid).ok(),
        toml::Value::String(name) => {
            let by_name = || privileges::user(name).ok().map(|(uid, _)| uid);
            name.parse().ok().or_else(by_name)
        }
        _ => None,
    };
    found.ok_or_else(|| format!("observers: there is no user {user}"))
}

/// A grant to join, of the file.
pub(super) fn joiner(table: JoinTable) -> Result<Join, String> {
    let whom = match (table.vm, table.uid) {
        (Some(vm), None) => Peer::Vm(vm),
        (None, Some(uid)) => Peer::User(uid),
        _ => return Err("a [[join]] names either a vm or a uid".into()),
    };
    let settings = table.settings.into_iter();
    let settings = settings.map(|(key, value)| Ok(format!("{key}={}", option(value)?)));
    let settings: Vec<String> = settings.collect::<Result<_, String>>()?;
    Ok(Join {
        whom,
        switch: table.switch,
        settings: of_join(&settings.join(",")),
    })
}

/// A grant to be a back-end, of the file.
pub(super) fn backend(table: BTreeMap<String, toml::Value>) -> Result<BackendGrant, String> {
    BackendGrant::of_words(words(table)?)
}

/// A program of the file.
pub(super) fn program(table: BTreeMap<String, toml::Value>) -> Result<TwinGrant, String> {
    TwinGrant::of_words(words(table)?)
}

fn words(table: BTreeMap<String, toml::Value>) -> Result<BTreeMap<String, String>, String> {
    let words = table.into_iter();
    words
        .map(|(key, value)| Ok((key, option(value)?)))
        .collect()
}

/// A number of bytes, or a text as [`units::size`] reads it.
pub(super) fn bytes(value: &toml::Value) -> Option<u64> {
    match value {
        toml::Value::Integer(number) => u64::try_from(*number).ok(),
        toml::Value::String(text) => units::size(text).ok(),
        _ => None,
    }
}
