"""The etcd cluster that Genie starts itself: the member of this machine, membership and maintenance."""
