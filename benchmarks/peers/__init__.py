"""Other people's buffers, each in an environment of its own (``make.sh``); nothing here may import ods_async."""
