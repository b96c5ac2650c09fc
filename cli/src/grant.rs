//! `vnplug grant`: who may see, send, join, be and use what; `vnplug revoke`: ports and channels that are taken back.

use clap::{ArgGroup, Args, Subcommand};
use serde_json::{Value, json};
use vnplug::{Client, Counted, GrantAction, GrantKind, Revoke, Whose};
use vnplug_ring::counters::label;

use crate::failure::{Failure, OK, Outcome, USAGE};
use crate::{out, text};

/// Shows and changes grants, for root and the daemon's own user.
#[derive(Debug, Subcommand)]
pub(crate) enum Grant {
    /// List the grants
    List(List),
    /// Give a grant, beside those that there are
    Add(Change),
    /// Give a grant in place of all of its kind that this viewer has of this source
    Set(Change),
    /// Take a grant away, from open ports too
    Rm(Change),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug grant list
  vnplug grant list --json | jq '.grants[] | select(.grant == \"send\")'")]
pub(crate) struct List {
    /// One JSON object: an array `grants`
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug grant add 'uid:1000=eth1:port 53'        # may see this too
  vnplug grant set 'vm:probe=eth1:not port 22'    # may see this and no more
  vnplug grant rm uid:1000=eth1                   # may see nothing of it any more
  vnplug grant rm --send vm:probe=eth1            # may not send through it any more
  vnplug grant add --join vm:a=lan0,vlan=10,mac=02:00:00:00:00:01
  vnplug grant rm --use vm:probe=kv               # may not use this back-end any more
  vnplug grant add --serve uid:1001=kv            # its process may be this back-end, too

Open ports and channels follow before the command returns: what is not permitted any more is neither received nor sent.
It holds at once, and again when the daemon starts. `docs/contexts.md` has what a grant may say.")]
pub(crate) struct Change {
    /// The grant, as with --allow of vnplugd: vm:NAME=SOURCE[:FILTER] or uid:N=SOURCE[:FILTER]; with --serve or --use
    /// uid:N=BACKEND or vm:NAME=BACKEND
    #[arg(value_name = "GRANT")]
    grant: String,
    /// To send, as with --allow-send
    #[arg(long, group = "kind")]
    send: bool,
    /// To join a switch, as with --allow-join
    #[arg(long, group = "kind")]
    join: bool,
    /// To be a back-end, as by `uid` of its [[backend]] table
    #[arg(long, group = "kind")]
    serve: bool,
    /// To connect to a back-end, as by `open` of its [[backend]] table
    #[arg(long = "use", group = "kind")]
    uses: bool,
    /// Only until the daemon ends
    #[arg(long)]
    once: bool,
}

/// Takes ports, or one direction of them, or channels of a back-end from their owners.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").args(["port", "group", "source", "backend"]))]
#[command(group = ArgGroup::new("whom").args(["vm", "uid"]).conflicts_with_all(["port", "group", "source"]))]
#[command(group = ArgGroup::new("whose").required(true).multiple(true)
    .args(["port", "vm", "uid", "group", "source", "backend"]))]
#[command(after_help = "\
Examples:
  vnplug revoke --port 7
  vnplug revoke --vm probe --sending
  vnplug revoke --source eth1 --receiving
  vnplug revoke --backend kv               # all channels of a back-end
  vnplug revoke --backend kv --vm probe    # those of this virtual machine

When the command returns, nothing more is received or sent by these ports, and what waited to be sent is
dropped. It does not keep anybody from opening a port again: `vnplug grant rm` does, and revokes as well.
Nothing more is passed in a channel: both sides are told that, and the program has two seconds to let go of memory.")]
pub(crate) struct RevokeArgs {
    /// The port of this number, which `vnplug stats` shows
    #[arg(long, value_name = "NUMBER")]
    port: Option<u32>,
    /// All ports of a virtual machine; with --backend, its channels
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
    /// All ports of a user; with --backend, its channels
    #[arg(long, value_name = "UID")]
    uid: Option<u32>,
    /// All members of the groups of a name
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// All ports of a source, or of one port of a switch
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// All channels of the back-end of this name, and no ports
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Receiving alone; the ports may still send
    #[arg(long, conflicts_with_all = ["sending", "backend"])]
    receiving: bool,
    /// Sending alone; the ports may still receive
    #[arg(long, conflicts_with = "backend")]
    sending: bool,
}

impl Grant {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let (action, change) = match self {
            Self::List(List { json }) => {
                let all = connect()?.grants()?;
                if *json {
                    let all = json!({"grants": all.iter().map(to_json).collect::<Value>()});
                    out::raw(&format!("{all}\n"))?;
                } else if all.is_empty() {
                    out::note(
                        "there are no grants: only root and the daemon's own user see anything",
                    );
                } else {
                    out::raw(&to_text(&all))?;
                }
                return Ok(OK);
            }
            Self::Add(change) => (GrantAction::Add, change),
            Self::Set(change) => (GrantAction::Set, change),
            Self::Rm(change) => (GrantAction::Remove, change),
        };
        let kinds = [
            (change.send, GrantKind::Send),
            (change.join, GrantKind::Join),
            (change.serve, GrantKind::Serve),
            (change.uses, GrantKind::Use),
        ];
        let named = kinds.into_iter().find(|(is_named, _)| *is_named);
        let kind = named.map_or(GrantKind::See, |(_, kind)| kind);
        connect()?.change_grant(action, kind, &change.grant, !change.once)?;
        Ok(OK)
    }
}

impl RevokeArgs {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let whose = self.whose().ok_or_else(|| {
            Failure::with_code(
                USAGE,
                "whose ports? --port, --vm, --uid, --group or --source; or --backend",
            )
        })?;
        connect()?.revoke(Revoke {
            whose,
            receiving: !self.sending,
            sending: !self.receiving,
        })?;
        Ok(OK)
    }

    fn whose(&self) -> Option<Whose> {
        if let Some(backend) = &self.backend {
            let vm = self.vm.as_ref().map(|name| format!("vm:{name}"));
            let user = self.uid.map(|uid| format!("uid:{uid}"));
            return Some(Whose::Channels {
                backend: backend.clone(),
                whose: vm.or(user).unwrap_or_else(|| "*".to_owned()),
            });
        }
        None.or(self.port.map(Whose::Port))
            .or(self.vm.clone().map(Whose::Vm))
            .or(self.uid.map(Whose::User))
            .or(self.group.clone().map(Whose::Group))
            .or(self.source.clone().map(Whose::Source))
    }
}

/// What a grant says beyond whom it is for and of what.
fn rest(grant: &Counted) -> &str {
    let rest = ["filter", "terms", "settings"].map(|key| label(grant, key));
    rest.into_iter().find(|it| !it.is_empty()).unwrap_or("")
}

fn to_json(grant: &Counted) -> Value {
    json!({
        "whom": grant.name, "grant": label(grant, "grant"), "source": label(grant, "source"),
        "says": rest(grant), "from": label(grant, "from"),
    })
}

fn to_text(all: &[Counted]) -> String {
    let row = |grant: &Counted| {
        vec![
            text::escape(&grant.name),
            text::escape(label(grant, "grant")),
            text::escape(label(grant, "source")),
            text::escape(rest(grant)),
            text::escape(label(grant, "from")),
        ]
    };
    text::table(
        &["WHOM", "MAY", "SOURCE", "SAYS", "FROM"],
        all.iter().map(row),
    )
}
