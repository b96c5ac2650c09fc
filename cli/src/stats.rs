//! `vnplug stats`: every counter, and whether the accounts close.
//!
//! The sums, and what each counter means, are in [`vnplug_ring::counters`]. What a port's reader says of
//! itself is shown as `reader_…`: a recorder's durable mark.

use clap::Args;
use serde_json::{Value, json};
use vnplug::{Client, Counted};
use vnplug_ring::counters::{Account, accounts};
use vnplug_store::name;

use crate::failure::{ACCOUNTS, Failure, OK, Outcome};
use crate::out;
use crate::text::{escape, grouped};

/// Shows every counter and checks that the accounts close.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug stats
  vnplug stats --json | jq '.counters[] | select(.kind == \"port\")'

`closes: yes` means that every frame is accounted for, to the packet, also under load: what the kernel
has counted and the daemon not read yet is in_kernel. If an account does not close the exit code is 5.")]
pub(crate) struct Stats {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

impl Stats {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let all = connect()?.stats()?;
        let accounts = accounts(&all);
        if self.json {
            let line = json!({
                "counters": all.iter().map(to_json).collect::<Value>(),
                "identities": accounts.iter().map(account_to_json).collect::<Value>(),
                "closes": accounts.iter().all(Account::closes),
            });
            out::raw(&format!("{line}\n"))?;
        } else {
            let counters: String = all.iter().map(to_text).collect();
            let lines: String = accounts.iter().map(account_to_text).collect();
            let closes = match accounts.iter().all(Account::closes) {
                true => "yes",
                false => "no",
            };
            let head = if lines.is_empty() { "" } else { "accounts\n" };
            out::raw(&format!("{counters}{head}{lines}closes: {closes}\n"))?;
        }
        let closes = accounts.iter().all(Account::closes);
        Ok(if closes { OK } else { ACCOUNTS.into() })
    }
}

/// A thing and its counters as JSON.
pub(crate) fn to_json(counted: &Counted) -> Value {
    let labels = counted
        .labels
        .iter()
        .map(|(key, value)| (key.clone(), json!(value)));
    let values = counted
        .values
        .iter()
        .map(|(key, value)| (key.clone(), json!(value)));
    json!({
        "kind": counted.kind, "name": counted.name,
        "labels": Value::Object(labels.collect()),
        "values": Value::Object(values.collect()),
    })
}

fn to_text(counted: &Counted) -> String {
    let mut text = format!("{} {}\n", escape(&counted.kind), escape(&counted.name));
    for (key, value) in counted.labels.iter().filter(|(_, value)| !value.is_empty()) {
        text += &format!("  {:<24} {}\n", escape(key), escape(value));
    }
    for (key, value) in &counted.values {
        let shown = match key.ends_with("_time_ns") {
            true => name::time(*value),
            false => grouped(*value),
        };
        text += &format!("  {:<24} {shown:>20}\n", escape(key));
    }
    text + "\n"
}

fn account_to_text(account: &Account) -> String {
    let parts: Vec<String> = account
        .parts
        .iter()
        .map(|(name, value)| format!("{} {}", grouped(*value), escape(name)))
        .collect();
    let verdict = match account.difference() {
        0 => "closes".to_owned(),
        difference => format!("DIFFERS by {difference}"),
    };
    let (name, total) = account.total;
    format!(
        "  {}: {} {name} = {}: {verdict}\n",
        escape(&account.about),
        grouped(total),
        parts.join(" + ")
    )
}

fn account_to_json(account: &Account) -> Value {
    let parts = account.parts.iter();
    let parts = parts.map(|(name, value)| (name.clone(), json!(value)));
    json!({
        "about": account.about, "name": account.total.0, "value": account.total.1,
        "sum_of": Value::Object(parts.collect()),
        "closes": account.closes(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_that_does_not_close_says_by_how_much() {
        let account = Account {
            about: "port 2".into(),
            total: ("offered", 1100),
            parts: vec![("delivered".into(), 1098), ("filtered".into(), 1)],
        };
        let text = "  port 2: 1,100 offered = 1,098 delivered + 1 filtered: DIFFERS by 1\n";
        assert_eq!(account_to_text(&account), text);
        assert_eq!(account_to_json(&account)["closes"], json!(false));
    }
}
